# SPDX-License-Identifier: Apache-2.0
"""Studies that run on a server."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from tests.patching.fake import FakeRunner
from vllm_steer import AsyncClient, Client, ServerError
from vllm_steer.patching import PatchingStudy
from vllm_steer.patching.file import encode

STUDY: dict[str, Any] = {"clean": "the red car is", "corrupt": "the blue car is", "answer": "fast", "foil": "slow"}
START = {"event": "start", "cells": 8}
CELL = {"event": "cell", "value": 0.0, "error": None}
FAILED = {"event": "error", "error": {"message": "the engine has ended", "code": 500, "param": None}}


def answering(*events: dict[str, Any]) -> httpx.MockTransport:
    """Return a server that answers with events; a request for anything else gets no answer in time."""
    stream = "".join(f"event: {event['event']}\ndata: {json.dumps(event)}\n\n" for event in events)

    def serve(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if not body.pop("stream", False):
            raise httpx.ReadTimeout("timed out")
        assert body == {**STUDY, "return_file": True}
        return httpx.Response(200, text=stream, headers={"content-type": "text/event-stream"})

    return httpx.MockTransport(serve)


async def patch(transport: httpx.MockTransport, *, asynchronous: bool) -> Any:
    if asynchronous:
        async with AsyncClient(transport=transport) as client:
            return await client.patch(**STUDY)
    with Client(transport=transport) as client:
        return client.patch(**STUDY)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_study_is_received_as_events(asynchronous: bool) -> None:
    """Catches a study that fails because the server sends nothing for longer than the client waits for data."""
    right = PatchingStudy(FakeRunner(), **STUDY).sweep(progress=False)
    summary = {"event": "summary", "file": base64.b64encode(encode(right)).decode()}
    found = await patch(answering(START, CELL, summary), asynchronous=asynchronous)
    assert found.grid("post_block").tolist() == right.grid("post_block").tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_study_that_ends_without_a_result(asynchronous: bool) -> None:
    """Catches None returned for a study that failed, and an error of the server that is lost."""
    with pytest.raises(ServerError, match="the engine has ended"):
        await patch(answering(START, CELL, FAILED), asynchronous=asynchronous)
    with pytest.raises(RuntimeError, match="without a result"):
        await patch(answering(START, CELL), asynchronous=asynchronous)

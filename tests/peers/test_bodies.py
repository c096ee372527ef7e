# SPDX-License-Identifier: Apache-2.0
"""Keys that a body has twice, with the middlewares of peers in front of an application that returns its body."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from vllm_steer.peers.rhizonymph.http import RhizonymphMiddleware
from vllm_steer.peers.vllm_lens.http import VllmLensMiddleware

pytest.importorskip("zstandard")

SITE = '{"layer": 1, "hook": "post_block", "dest_position": 2, "source_inline": [1.0]}'
LENS, RHIZONYMPH = [VllmLensMiddleware], [RhizonymphMiddleware]
BOTH = [VllmLensMiddleware, RhizonymphMiddleware]


async def post(middlewares: list[Any], members: str) -> httpx.Response:
    """Send a body with ``members`` beside its prompt."""
    app = FastAPI()

    async def answer(request: Request) -> Any:
        return {"choices": [{"index": 0, "text": "x"}], "received": (await request.body()).decode()}

    app.post("/v1/completions")(answer)
    for middleware in middlewares:
        app.add_middleware(middleware)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.post("/v1/completions", content=f'{{"prompt": "x", {members}}}'.encode())


@pytest.mark.parametrize("middlewares", [LENS, RHIZONYMPH, BOTH], ids=["lens", "rhizonymph", "both"])
@pytest.mark.parametrize(
    ("members", "peer", "field"),
    [
        ('"extra_args": {"output_residual_stream": [1]}, "extra_args": {"mine": 1}', VllmLensMiddleware, "extra_args"),
        ('"vllm_xargs": {"apply_hooks": null, "apply_hooks": null}', VllmLensMiddleware, "apply_hooks"),
        (
            '"steering": [1], "steering": [2], "extra_args": {"skip_reading_prefix_cache": true}',
            VllmLensMiddleware, "steering",
        ),
        (f'"patch": [{SITE}], "patch": []', RhizonymphMiddleware, "patch"),
        (f'"temperature": 0, "temperature": 1, "patch": [{SITE}]', RhizonymphMiddleware, "temperature"),
        ('"capture_wait": true, "capture_wait": true', RhizonymphMiddleware, "capture_wait"),
    ],
)  # fmt: skip
async def test_repeated_keys_are_refused(middlewares: list[Any], members: str, peer: Any, field: str) -> None:
    """Catches a key that is ignored because the translation kept the second one only."""
    answer = await post(middlewares, members)
    if peer in middlewares or field == "steering":  # also a field of ours
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert "twice" in answer.json()["error"]["message"]
    else:
        assert answer.json()["received"] == f'{{"prompt": "x", {members}}}'


async def test_other_bodies_keep_their_repeated_keys() -> None:
    """Catches a body without fields of a peer that is changed or refused."""
    members = '"temperature": 0, "temperature": 1, "steering_vectors": {}'
    assert json.loads((await post(BOTH, members)).text)["received"] == f'{{"prompt": "x", {members}}}'

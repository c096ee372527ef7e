# SPDX-License-Identifier: Apache-2.0
"""Global steering of prompts of one HTTP request that vLLM adds one after another, such as the clips of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from vllm.sampling_params import SamplingParams

from tests.server.fakes import FakeEngine, engine_context, vector
from vllm_steer.frontend import context as contexts
from vllm_steer.frontend.requests import complete_params
from vllm_steer.params import APPLIED_KEY, PROGRAM_KEY
from vllm_steer.server.http.apply_fields import add_request
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_context import current_request

ROUTE = "/v1/audio/transcriptions"


@pytest.mark.parametrize("steered_before", [True, False])
async def test_clips_get_the_global_steering_of_the_first(steered_before: bool) -> None:
    """Catches a transcription whose later clips run under another global steering than `steering_applied` names."""
    client_engine, engine = FakeEngine(), engine_context()
    setattr(client_engine.input_processor, contexts._CONTEXT, engine)
    app = FastAPI()
    app.state.engine_client = client_engine
    made: list[dict[str, Any]] = []
    if steered_before:
        engine.registry.set(base={"post_block": {"1": vector()}})

    async def add(_engine: Any, request_id: str, prompt: Any, params: Any) -> None:
        made.append(complete_params(engine, params).extra_args or {})
        context = current_request.get()
        assert context is not None
        context.applied_json = made[-1].get(APPLIED_KEY) or None  # as `track_sample` does

    @app.post(ROUTE)
    async def transcribe() -> StreamingResponse:
        params = SamplingParams(max_tokens=1)

        async def events() -> AsyncIterator[str]:
            for clip in range(3):
                await add_request(add, client_engine, f"clip-{clip}", None, params)
                yield 'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
                engine.registry.set(base={"post_block": {str(clip): vector(2.0)}})
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    app.add_middleware(SteeringMiddleware)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
    for _ in range(2):
        epoch = engine.registry.status().epoch
        steered = engine.registry.status().digest is not None
        made.clear()
        first = (await client.post(ROUTE)).text.splitlines()[0].removeprefix("data: ")
        assert [each.get(PROGRAM_KEY) for each in made] == [made[0].get(PROGRAM_KEY)] * 3
        assert (PROGRAM_KEY in made[0]) == steered
        applied = msgspec.json.decode(first).get("steering_applied")
        assert (applied and applied["epoch"]) == (epoch if steered else None)

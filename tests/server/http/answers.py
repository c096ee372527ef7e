# SPDX-License-Identifier: Apache-2.0
"""An application that responds like vLLM, with prepared capture results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI
from starlette.responses import JSONResponse, StreamingResponse
from vllm.sampling_params import SamplingParams

from tests.server.application import Body
from tests.server.fakes import HIDDEN, FakeEngine
from vllm_steer.capture import CapturedRequest, CaptureResult, SiteRows
from vllm_steer.capture.results import CaptureResults
from vllm_steer.frontend.sample_state import SampleState
from vllm_steer.request import CaptureSpec
from vllm_steer.server.http.apply_fields import apply_to_params
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_context import current_request, track_sample

SPEC: dict[str, Any] = {"hooks": {"post_block": [1]}, "positions": "all"}
DONE = "data: [DONE]\n\n"


def captured(rows: int = 3, value: float = 1.0, dtype: torch.dtype = torch.float32) -> CapturedRequest:
    site = SiteRows(np.arange(rows, dtype=np.int64), torch.full((rows, HIDDEN), value, dtype=dtype))
    return CapturedRequest(
        request_id="r", sample=0, model="tiny", prompt_token_ids=tuple(range(rows)), output_token_ids=(7,),
        spec=CaptureSpec(**SPEC), sites={("post_block", 1): site}, status="ok", error=None,
    )  # fmt: skip


def done(data: Any, status: Any = "ok", error: str | None = None) -> Future[CaptureResult]:
    future: Future[CaptureResult] = Future()
    future.set_result(CaptureResult(status, error, data))
    return future


def make_capturing_app(
    results: list[dict[str, Future[CaptureResult]]], *, prompts: int = 1, runs: int = 1, **flags: int
) -> FastAPI:
    """Return an app whose ``/v1/completions`` returns one choice per entry of ``results``.

    Samples finish in reverse order and outside of the request's context, as in vLLM; ``runs`` times each.
    """
    app = FastAPI()
    app.state.args = SimpleNamespace(**flags)
    app.state.engine_client = FakeEngine()

    @app.post("/v1/completions")
    async def completions(body: Body) -> Any:
        await finish_samples(body, results, prompts, runs)
        extra = body.model_extra or {}
        choices = [{"index": i, "text": "é"} for i in range(extra.get("choices", len(results)))]
        if extra.get("status"):
            return JSONResponse({"error": {"message": "no"}}, extra["status"])
        if extra.get("stream"):
            return StreamingResponse(pieces(extra["stream"]), media_type="text/event-stream")
        return {"choices": choices} if choices else {"text": "none"}

    app.add_middleware(SteeringMiddleware)
    return app


async def finish_samples(
    body: Any, results: list[dict[str, Future[CaptureResult]]], prompts: int = 1, runs: int = 1
) -> None:
    samples = len(results) // prompts
    states = [
        SimpleNamespace(
            request_index=i % max(samples, 1), external_req_id=f"r{i}", parent_req=None, _steering_sample=SampleState()
        )
        for i in range(len(results))
    ]
    for number in range(prompts):
        params = apply_to_params(body, SamplingParams(n=max(samples, 1)))
        for state in states[number * samples : (number + 1) * samples]:
            request = SimpleNamespace(request_id="r", sampling_params=params)
            track_sample(SimpleNamespace(request_states={"r": state}), request)

    async def elsewhere() -> None:
        current_request.set(None)
        for state, result in reversed(list(zip(states, results, strict=True)) * runs):
            if state._steering_sample.listener is not None:
                state._steering_sample.listener.on_results(CaptureResults(result))

    await asyncio.create_task(elsewhere())


async def pieces(texts: list[str]) -> AsyncIterator[str]:
    for text in texts:
        yield text

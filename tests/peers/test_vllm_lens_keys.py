# SPDX-License-Identifier: Apache-2.0
"""The interfaces of vllm-lens and of the fork over HTTP on a server with API keys."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from vllm.sampling_params import SamplingParams

from tests.server.application import Body
from tests.server.auth.guarded import write_keys
from tests.server.fakes import FakeEngine
from tests.server.http.answers import captured
from vllm_steer.capture.files.tensors import encode_request
from vllm_steer.peers.vllm_lens import decode_activations
from vllm_steer.peers.vllm_lens.http import VllmLensMiddleware
from vllm_steer.server.auth.current_key import current_owner
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.apply_fields import apply_to_params
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.routes.captures import capture_store_of

ROUTE = "/v1/completions"


async def test_stored_rows_of_a_key_at_its_limit(tmp_path: Path) -> None:
    """Catches a stream without its activations, because the request for the stored rows exceeds the key's limit."""
    pytest.importorskip("zstandard")
    rights = {"alice": (Right.CAPTURE,)}
    secrets = write_keys(tmp_path / "keys.json", rights, {"alice": {"steering_requests": 1}})
    app = FastAPI()
    app.state.args = SimpleNamespace(steering_keys=str(tmp_path / "keys.json"))
    app.state.engine_client = FakeEngine()

    async def answer(body: Body) -> StreamingResponse:
        apply_to_params(body, SamplingParams(max_tokens=1))
        stored = capture_store_of(app).put(b"".join(encode_request(captured())), "safetensors", current_owner())
        report = {"status": "ok", "error": None, "id": stored, "bytes": 1, "format": "safetensors", "expires_in": 9}
        choice = {"index": 0, "capture_results": {"memory": report}}
        event = json.dumps({"object": "capture_results", "choices": [choice]}, separators=(",", ":"))

        async def events() -> AsyncIterator[str]:
            yield f"data: {event}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    app.post("/v1/completions")(answer)
    app.add_middleware(SteeringMiddleware)
    app.add_middleware(VllmLensMiddleware)
    body = {"prompt": "x", "stream": True, "extra_args": {"output_residual_stream": [1]}}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        got = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {secrets['alice']}"})
    assert got.status_code == 200, got.text
    first = json.loads(got.text.split("\n\n")[0].removeprefix("data: "))
    assert "activations_error" not in first
    assert decode_activations(first["activations"])["residual_stream"].shape[1] == 3

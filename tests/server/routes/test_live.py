# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/steering/requests/{id}`` with a limit of the norm that an edit may add, on a small application."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import torch
from fastapi import FastAPI

from tests.server.fakes import REPORT
from vllm_steer.capture.readout_stream import ReadoutStream
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.errors import SteeringError
from vllm_steer.frontend import live
from vllm_steer.frontend.live import EndedRequestError, LiveSample, set_strength
from vllm_steer.frontend.sample_state import RunningCapture, SampleState
from vllm_steer.program import compile_program
from vllm_steer.registry.index import RegistryLimits
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.request import parse_fields
from vllm_steer.server.auth.current_key import current_owner
from vllm_steer.server.http.running_requests import RunningRequest, RunningRequests
from vllm_steer.server.routes.live import make_router

SAMPLE = LiveSample("sample", "live id")
EDITS: dict[str, dict[str, Any]] = {
    "push": {"kind": "add", "vector": [3.0, 4.0], "strength": -2.0},
    "hold": {"kind": "clamp", "vector": [3.0, 4.0], "low": 15.0, "strength": 0.5},
    "turn": {"kind": "ablate", "vector": [3.0, 4.0]},
    "swap": {"kind": "replace", "vector": [3.0, 4.0], "subspace": [[3.0, 4.0]]},
    "off": {"kind": "clamp", "vector": [3.0, 4.0], "low": 90.0, "strength": 0.0},
}


class FakeEngine:
    """Engine with one running sample of a request with live strengths, which confirms every change."""

    def __init__(self, max_norm: float) -> None:
        edits = [{"point": "post_block", "layers": [1], "live": name, **edit} for name, edit in EDITS.items()]
        program = compile_program(
            parse_fields({"steering": edits}), edit_paths=[f"steering[{i}]" for i in range(len(EDITS))]
        )
        assembler = RowAssembler(0, 0, torch.float32)
        capabilities = Capabilities.merge([REPORT], SteeringConfig())
        registry = SteeringRegistry(capabilities, limits=RegistryLimits(max_norm=max_norm))
        manager: Any = None
        capture = RunningCapture(manager, RowReceiver(), assembler, readouts=ReadoutStream(program, assembler, 3))
        sample = SampleState(capture=capture, live_id=SAMPLE.live_id)
        detokenizer = SimpleNamespace(num_output_tokens=lambda: 3)
        state = SimpleNamespace(request_id="sample", _steering_sample=sample, prompt_len=4, detokenizer=detokenizer)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1),
            model_config=SimpleNamespace(served_model_name="tiny"),
        )
        self.output_processor = SimpleNamespace(
            request_states={"sample": state},
            _steering_context=SimpleNamespace(registry=registry, capabilities=capabilities),
        )

    async def collective_rpc(self, method: str, args: Any) -> list[list[int]]:
        return [[7]]


async def change(
    strengths: dict[str, float], max_norm: float, own_id: str = "one", path: str = "one"
) -> httpx.Response:
    """Return the response to a change of live strengths of the request to which a client gave ``own_id``."""
    running, entry = RunningRequests(), RunningRequest(current_owner())
    running.add_sample(entry, f"cmpl-{own_id}-0", SAMPLE)
    app = FastAPI()
    app.include_router(make_router(running, FakeEngine(max_norm)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.post(f"/v1/steering/requests/{path}", json=strengths)


async def test_a_change_is_one_call_of_the_engine_and_a_large_body_none() -> None:
    """Catches a call per sample, and a body beyond 64 KiB: changes have no limit of their rate."""
    engine, calls = FakeEngine(0.0), []

    async def call(method: str, args: Any) -> list[list[int]]:
        calls.append(args)
        return [[7] * len(args[0])]

    engine.collective_rpc = call  # type: ignore[method-assign]
    running, entry = RunningRequests(), RunningRequest(current_owner())
    engine.output_processor.request_states = {
        name: SimpleNamespace(
            request_id=name, _steering_sample=engine.output_processor.request_states["sample"]._steering_sample
        )
        for name in ("sample", "second", "third")
    }
    for name in engine.output_processor.request_states:
        running.add_sample(entry, "cmpl-one-0", LiveSample(name, SAMPLE.live_id))
    app = FastAPI()
    app.include_router(make_router(running, engine))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        path = "/v1/steering/requests/one"
        assert (await client.post(path, json={"push": 2.0})).status_code == 200
        assert calls == [([SAMPLE.live_id] * 3, {"push": 2.0})]
        response = await client.post(path, content=b" " * 65_537, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["message"] == "body: exceeds 64 KiB"
    assert len(calls) == 1


@pytest.mark.parametrize("own_id", ["run/42", "/run//42/", "a b?c", "%2F"])
async def test_every_id_of_a_client_is_found(own_id: str) -> None:
    """Catches ids with slashes that match no route, in `X-Request-Id` as well as in the id of the response."""
    for given in (own_id, f"cmpl-{own_id}"):
        response = await change({"push": 2.0}, 0.0, own_id, quote(given, safe=""))
        assert response.status_code == 200, response.text
        assert response.json()["id"] == given
        assert (response.json()["position"], response.json()["positions"]) == (7, {"0": 7})


async def test_an_ended_request_whose_id_is_used_again() -> None:
    """Catches a change that is confirmed although its request has ended, because a new request has its id."""
    engine = FakeEngine(0.0)

    async def begin_another(method: str, args: Any) -> list[list[int]]:
        assert args == ([SAMPLE.live_id], {"push": 2.0})
        engine.output_processor.request_states["sample"] = SimpleNamespace(request_id="sample")
        return [[7]]

    engine.collective_rpc = begin_another  # type: ignore[method-assign]
    with pytest.raises(EndedRequestError, match="ended before the change"):
        await set_strength(engine, "one", [SAMPLE], {"push": 2.0})


async def test_a_running_request_with_the_id_of_an_ended_one() -> None:
    """Catches a change of another request, perhaps of another API key, which has the engine id of an ended sample."""
    with pytest.raises(EndedRequestError, match="has ended"):
        await set_strength(FakeEngine(0.0), "one", [LiveSample("sample", "of the ended one")], {"push": 2.0})


@pytest.mark.parametrize(
    ("strengths", "refused"),
    [
        ({"push": 2.0}, None),
        ({"push": 100000}, r"push: with 100000, steering\[0\] may add a norm of 1e\+06"),
        ({"push": -2.5}, "may add a norm of 25"),
        ({"hold": 2.5}, None),
        ({"hold": -4.0}, r"steering\[1\] may add a norm of 30"),
        ({"turn": 1.0, "hold": 4.0}, "hold: with 4, "),
        ({"turn": 100000}, None),
        ({"off": 100000}, None),
    ],
)
@pytest.mark.parametrize("max_norm", [20.0, 0.0])
async def test_norm_limit(strengths: dict[str, float], refused: str | None, max_norm: float) -> None:
    """Catches a live strength that adds more than the server allows, and one below the limit that is refused."""
    response = await change(strengths, max_norm)
    if refused is None or not max_norm:
        assert response.status_code == 200, response.text
        return
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert re.search(refused, message)
    assert "this server allows 20 (--steering-max-norm)" in message


@pytest.mark.parametrize(("strength", "status"), [(1.82e18, 200), (1.84e18, 400)])
async def test_overflow(strength: float, status: int) -> None:
    """Catches a live strength whose product with the length of the edit's vector, 10 here, has an infinite square."""
    response = await change({"push": strength}, 0.0)
    assert response.status_code == status
    if status == 400:
        assert "overflows float32" in response.json()["error"]["message"]


@pytest.mark.parametrize("first", ["sample", "second"])
async def test_strengths_in_force_in_any_sample(first: str) -> None:
    """Catches a check against the first sample alone, when an earlier change was of another sample."""
    engine, second = FakeEngine(0.0), FakeEngine(0.0)
    states = engine.output_processor.request_states
    states["second"] = second.output_processor.request_states["sample"]
    states["second"]._steering_sample.live_strengths["turn"] = 1e5
    samples = [LiveSample(name, SAMPLE.live_id) for name in sorted(states, key=first.__ne__)]
    with pytest.raises(SteeringError, match="overflow"):
        await set_strength(engine, "one", samples, {"push": 1e15})
    assert states["sample"]._steering_sample.live_strengths == {}
    await set_strength(engine, "one", [LiveSample("sample", SAMPLE.live_id)], {"push": 1e15})


async def test_samples_with_equal_strengths_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check for each of thousands of samples, which keeps the event loop from other requests."""
    engine, checked = FakeEngine(0.0), []
    monkeypatch.setattr(live, "check_overflow", lambda *arguments: checked.append(arguments[-1]))
    samples = [LiveSample(f"sample {number}", SAMPLE.live_id) for number in range(300)]
    states = engine.output_processor.request_states
    states.update({each.engine_id: FakeEngine(0.0).output_processor.request_states["sample"] for each in samples})
    states["sample 7"]._steering_sample.live_strengths["turn"] = 2.0
    live.check_strengths(engine, "one", samples, {"push": 1.0})
    assert sorted(checked, key=len) == [{}, {"turn": 2.0}]

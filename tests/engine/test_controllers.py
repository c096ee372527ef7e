# SPDX-License-Identifier: Apache-2.0
"""Controllers of live strengths, in an ``AsyncLLM``, and the example."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from vllm import AsyncEngineArgs

from tests.tiny import direction
from vllm_steer import AsyncLLM, ControlledRequest, Controller, Edit, SamplingParams, SteeringError, engine_kwargs
from vllm_steer.frontend import controller_runner, controllers
from vllm_steer.frontend.controllers import read_controller
from vllm_steer.server import apply_flags

EXAMPLE = Path(__file__).parents[2] / "examples" / "controller" / "pi.py"
RELEASE = threading.Event()
SEEN: dict[str, list[Any]] = {}


class Scripted(Controller):
    """Does what the request's id says."""

    name = "scripted"

    def __init__(self, *, step: float = 0.25) -> None:
        self._next, self._step = 0.0, step

    def on_readouts(self, request: ControlledRequest, positions: Any, values: Any) -> Mapping[str, float] | None:
        seen = SEEN.setdefault(request.request_id, [])
        seen.append((positions["mood"].tolist(), values["mood"].tolist()))
        if request.request_id == "hangs":
            RELEASE.wait(60)
        if request.request_id == "raises":
            raise ValueError("a bug")
        if request.request_id == "nonsense":
            return {"clam": float("nan")}
        self._next += self._step
        return {"calm": self._next}


class Synchronous(Scripted):
    name, mode = "synchronous", "sync"


class Unready(Scripted):
    name = "unready"

    def __init__(self) -> None:
        raise RuntimeError("no file")


@pytest.fixture(autouse=True, scope="module")
def offered() -> Any:
    """Offer the controllers of this module as if packages were installed."""
    classes = {"scripted": "Scripted", "synchronous": "Synchronous", "unready": "Unready", "misnamed": "Scripted"}
    points = [EntryPoint(name, f"{__name__}:{each}", controllers.ENTRY_POINT_GROUP) for name, each in classes.items()]
    points.append(EntryPoint("dict", "builtins:dict", controllers.ENTRY_POINT_GROUP))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controllers, "entry_points", lambda group: EntryPoints(points))
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_llama: Path) -> AsyncIterator[Any]:
    args = AsyncEngineArgs(
        model=str(tiny_llama), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=512,
        **engine_kwargs(),
    )  # fmt: skip
    made = AsyncLLM.from_engine_args(args, steering_controller={"scripted": {"step": 0.5}})
    yield made
    made.shutdown()


async def generate(engine: Any, name: str, tokens: int = 60, **fields: Any) -> Any:
    given: dict[str, Any] = {
        "readouts": {"mood": {"probe": direction(1, 0.05), "point": "post_block", "layer": 1}},
        "steering": [
            Edit(kind="add", point="post_block", layers=1, vector=direction(1, 1.0), tokens="generated", live="calm")
        ],
    } | fields
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, **given)
    async for output in engine.generate({"prompt_token_ids": list(range(20, 30))}, params, name):
        last = output
    return last.outputs[0]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_controller_steers_its_request_only(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers without effect, values lost or repeated, and failures that are hidden or reach others."""
    records: list[Any] = []
    monkeypatch.setattr(controller_runner.audit, "record_strengths", lambda *given: records.append(given))
    names = ("works", "hangs", "raises", "nonsense")
    outputs = dict(zip(names, await asyncio.gather(*(generate(engine, name) for name in names)), strict=True))
    plain = await generate(engine, "plain", readouts=None)
    RELEASE.set()
    assert "plain" not in SEEN
    for name in names[1:]:
        assert set(outputs[name].steering_trace.live["calm"]) == {1.0}, name
        assert outputs[name].token_ids == plain.token_ids
        assert len(SEEN[name]) == 1
    errors = {name: outputs[name].steering_trace.controller_error for name in names}
    assert errors["works"] is None and errors["hangs"] is None and plain.steering_trace.controller_error is None
    # The text of an exception may contain secrets of the server.
    assert errors["raises"] == "the controller scripted has failed: ValueError; the server's log has the details"
    assert errors["nonsense"].startswith("the controller scripted has failed: clam: is not a live strength")
    found = outputs["works"]
    strengths = found.steering_trace.live["calm"]
    answered = [0.5 * (number + 1) for number in range(len(SEEN["works"]))]
    assert set(strengths) - {1.0} <= set(answered) and len(set(strengths)) > 2
    changed = strengths[strengths != 1.0] if strengths[0] == 1.0 else strengths
    assert (np.diff(changed) >= 0).all()
    positions = [position for each, _ in SEEN["works"] for position in each]
    values = [value for _, each in SEEN["works"] for value in each]
    # Values that arrive with the last output have no effect, so they may be missing.
    assert positions == found.readouts["mood"].positions.tolist()[: len(positions)]
    np.testing.assert_array_equal(np.float32(values), found.readouts["mood"].values[: len(values)])
    assert [request_id for request_id, _ in records] == ["works"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"script": {}}, "no installed package offers the controller 'script'.*did you mean scripted"),
        ({"synchronous": {}}, "mode 'sync' .* not supported.*use \"async\""),
        ({"dict": {}}, "not a subclass of Controller"),
        ({"misnamed": {}}, "has name 'scripted', not 'misnamed'"),
        ({"unready": {}}, "cannot be created: no file"),
        ({"scripted": {"stop": 1}}, "unknown option 'stop'"),
        ({"scripted": {"step": "x"}}, "got 'x'"),
        ({"scripted": {}, "dict": {}}, "one controller"),
        ("scripted", "one controller"),
    ],
)
def test_refused(given: Any, words: str) -> None:
    """Catches a wrong controller that fails when a request arrives."""
    with pytest.raises(SteeringError, match=words):
        read_controller(given, "steering_controller")


def test_flag() -> None:
    """Catches options of the flag that are lost on their way to the API servers."""
    assert json.loads(apply_flags._controller("scripted:step=2")) == {"scripted": {"step": "2"}}
    with pytest.raises(SteeringError, match="key=value"):
        apply_flags._controller("scripted:step")


def test_example_holds_a_probe_at_its_target() -> None:
    """Catches a wrong sign, a missing integral, and strengths beyond the limit."""
    spec = importlib.util.spec_from_file_location("pi", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    controller = module.PI(readout="mood", live="calm", target=2.0)
    request = ControlledRequest("a", 0, 5, ("calm",))
    value, strength = 0.0, 0.0
    for position in range(200):
        value = -1.0 + 1.5 * strength
        (strength,) = controller.on_readouts(request, {"mood": [position]}, {"mood": np.array([value])}).values()
    assert value == pytest.approx(2.0, abs=1e-3)
    for position in range(200):
        answer = controller.on_readouts(request, {"mood": [position]}, {"mood": np.array([-50.0])})
    assert answer == {"calm": 8.0}
    assert controller.on_readouts(ControlledRequest("b", 0, 5, ("other",)), {}, {"mood": np.array([1.0])}) is None

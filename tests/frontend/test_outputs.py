# SPDX-License-Identifier: Apache-2.0
"""Outputs of an engine in vLLM's output processor, without an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from tests.server.fakes import engine_context, vector
from tests.tiny import code_of
from vllm_steer import ControlledRequest, Controller, Edit, SamplingParams
from vllm_steer.capture.row_payload import RECORDS, ROWS_REQUEST_ID, encode_step
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.engine.admission import REFUSED
from vllm_steer.frontend import context as contexts
from vllm_steer.frontend.controller_runner import ControllerRunner
from vllm_steer.frontend.live import EndedRequestError
from vllm_steer.frontend.requests import complete_params
from vllm_steer.frontend.sample_state import sample_of
from vllm_steer.params import program_of
from vllm_steer.plugin.entry_point import wrap_front_end
from vllm_steer.plugin.request_state import CapacityError, SteeredRequestState
from vllm_steer.program.records import stop_reason
from vllm_steer.server.http.readout_feed import ReadoutFeed
from vllm_steer.server.http.schemas import TraceForm

PROMPT = [5, 6, 7]
SITE = {"point": "post_block", "layer": 1}
READOUTS: dict[str, Any] = {"mood": {"probe": vector(), **SITE, "positions": "all"}}


def add(tokens: Any, **fields: Any) -> Edit:
    return Edit(kind="add", point="post_block", layers=1, vector=vector(), tokens=tokens, **fields)


class FrontEnd:
    """An output processor with the wraps of this package."""

    output_processor: Any
    vllm_config: Any
    collective_rpc: Any

    def __init__(self, controller: type[Controller] | None = None) -> None:
        wrap_front_end()
        self.context = engine_context()
        if controller is not None:
            object.__setattr__(self.context, "controllers", ControllerRunner(self, controller, {}))
        self.processor = OutputProcessor(None, log_stats=False)
        setattr(self.processor, contexts._CONTEXT, self.context)

    def submit(self, name: str, n: int = 1, features: Any = None, **fields: Any) -> RequestOutputCollector:
        """Submit a request as ``AsyncLLM.add_request`` does, with features of modalities beside its tokens."""
        params = SamplingParams(n=n, max_tokens=20, detokenize=False, output_kind=RequestOutputKind.DELTA, **fields)
        params = complete_params(self.context, params)
        queue = RequestOutputCollector(params.output_kind, name)

        def made(request_id: str, given: Any) -> EngineCoreRequest:
            about = (given, None, 0.0, None, None, None)
            return EngineCoreRequest(request_id, PROMPT, features, *about, external_req_id=name)

        if n == 1:
            self.processor.add_request(made(name, params), None, None, 0, queue)
            return queue
        parent = ParentRequest(made(name, params))
        for number in range(n):
            self.processor.add_request(made(*parent.get_child_info(number)), None, parent, number, queue)
        return queue

    def step(self, *outputs: EngineCoreOutput) -> Any:
        return self.processor.process_outputs(list(outputs))


def token(name: str, number: int) -> EngineCoreOutput:
    return EngineCoreOutput(name, [number])


def refusal(name: str) -> EngineCoreOutput:
    return EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason=f"{REFUSED}no room")


def rows(names: Sequence[str], start: int, count: int, width: int, projection: bytes = RECORDS) -> EngineCoreOutput:
    """Return the output that carries records, or with another format rows, which hold their position."""
    code = width if projection == RECORDS else code_of("post_block", 1)
    index = RowIndex(tuple(names), ((code,),) * len(names), projection)
    positions = np.tile(np.arange(start, start + count, dtype=np.float32), len(names))
    data = np.repeat(positions[:, None], width, axis=1)
    step = StepRows(index, np.full(len(names), start), np.full(len(names), count), data.view(np.uint8))
    return EngineCoreOutput(ROWS_REQUEST_ID, [], kv_transfer_params=encode_step(step), routed_experts=step.rows)


def width_of(**fields: Any) -> int:
    program = program_of(SamplingParams(**fields))
    assert program is not None
    return program.layout.width


@pytest.mark.parametrize("refused", [1, 2, 3])
async def test_a_refused_sample_ends_its_siblings(refused: int) -> None:
    """Catches samples that the engine computes after the client got an error, and parents that are kept forever."""
    front = FrontEnd()
    queue = front.submit("many", n=3, steering=[add("all")])
    front.submit("other", n=2, steering=[add("all")])
    front.step(*(token(f"{i}_many", 8) for i in range(3)))
    assert (await queue.get()).outputs
    processed = front.step(*(refusal(f"{i}_many") for i in range(refused)), token("0_other", 8))
    with pytest.raises(CapacityError, match="no room"):
        await queue.get()
    assert sorted(processed.reqs_to_abort) == [f"{i}_many" for i in range(refused, 3)]
    assert set(front.processor.parent_requests) == {"other"}
    assert set(front.processor.request_states) == {"0_other", "1_other"}
    assert set(front.processor.external_req_ids) == {"other"}
    assert front.step(token("2_many", 9), token("1_other", 9)).reqs_to_abort == []


class Listener(Controller):
    """Notes the positions that it gets."""

    name = "listener"
    seen: dict[str, list[int]]
    arrived: threading.Semaphore

    def on_readouts(self, request: ControlledRequest, positions: Any, values: Any) -> Mapping[str, float] | None:
        type(self).seen.setdefault(request.request_id, []).extend(positions["mood"].tolist())
        type(self).arrived.release()
        return None


async def test_controllers_get_readouts_of_every_slice() -> None:
    """Catches readouts that are dropped because they arrive ahead of the output of their token.

    vLLM processes the outputs of a step in slices. The rows of all requests are in the first slice.
    """
    Listener.seen, Listener.arrived = {}, threading.Semaphore(0)
    front = FrontEnd(Listener)
    fields: dict[str, Any] = {"readouts": READOUTS, "steering": [add("generated", live="calm")]}
    names, width = ("first", "second"), width_of(**fields)
    for name in names:
        front.submit(name, **fields)
    for step in range(3):
        start, count = (len(PROMPT) + step - 1, 1) if step else (0, len(PROMPT))
        front.step(rows(names, start, count, width), token("first", 8))
        front.step(token("second", 8))
    expected = {name: [0, 1, 2, 3, 4] for name in names}
    while Listener.seen != expected:
        assert Listener.arrived.acquire(timeout=10), Listener.seen
    front.step(*(EngineCoreOutput(name, [8], finish_reason=FinishReason.LENGTH) for name in names))


class Unready(Controller):
    """Cannot be created."""

    name = "unready"

    def __init__(self) -> None:
        raise RuntimeError("no file")

    def on_readouts(self, request: ControlledRequest, positions: Any, values: Any) -> Mapping[str, float] | None:
        return None


async def test_a_controller_and_the_id_of_an_aborted_sample() -> None:
    """Catches a late answer that changes a new sample with the id of an aborted one, and a thread that never ends."""
    Listener.seen, Listener.arrived = {}, threading.Semaphore(0)
    front = FrontEnd(Listener)
    front.output_processor = front.processor
    front.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    changed: list[Any] = []

    async def collective_rpc(method: str, args: Any) -> list[list[int]]:
        changed.append(args)
        raise EndedRequestError("request_id", "has ended")

    front.collective_rpc = collective_rpc
    runner = front.context.controllers
    assert runner is not None
    fields: dict[str, Any] = {"readouts": READOUTS, "steering": [add("generated", live="calm")]}
    front.submit("again", **fields)
    before = runner._samples["again"]
    front.processor.abort_requests(["again"], internal=True)
    front.submit("again", **fields)
    await runner.apply(before, {"calm": 2.0})
    assert not changed
    await runner.apply(runner._samples["again"], {"calm": 2.0})
    assert len(changed) == 1

    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name.endswith("controller-again")]

    for _ in range(100):
        if len(threads()) == 1:
            break
        await asyncio.sleep(0.05)
    assert len(threads()) == 1
    front.processor.abort_requests(["again"], internal=True)
    front.step()


@pytest.mark.parametrize("over_http", [False, True])
async def test_the_trace_names_a_controller_that_cannot_be_created(over_http: bool) -> None:
    """Catches a sample without its controller that looks like a controlled one."""
    front = FrontEnd(Unready)
    fields: dict[str, Any] = {"readouts": READOUTS, "steering": [add("generated", live="calm")]}
    queue = front.submit("one", **fields)
    feed = ReadoutFeed(front.processor.request_states["one"]) if over_http else None
    front.step(rows(["one"], 0, len(PROMPT), width_of(**fields)), token("one", 8))
    front.step(EngineCoreOutput("one", [8], finish_reason=FinishReason.LENGTH))
    output = await queue.get()
    # Without the exception's text, which may contain secrets of the server.
    expected = "the controller unready cannot be created: RuntimeError; the server's log has the details"
    if feed is None:
        assert output.outputs[0].steering_trace.controller_error == expected
    else:
        feed.take_all()
        trace = feed.take_trace()
        assert trace is not None and trace["controller_error"] == expected
        msgspec.convert(trace, TraceForm)


async def test_embeddings_beside_images_have_no_token() -> None:
    """Catches the placeholder tokens of embeddings in captures of a prompt with images, which has no mask of tokens."""
    front = FrontEnd()
    places = {"image": PlaceholderRange(0, 1), "prompt_embeds": PlaceholderRange(1, 1)}
    features = [MultiModalFeatureSpec(None, name, name, place) for name, place in places.items()]
    capture = {"memory": {"hooks": {"post_block": [1]}, "positions": "all_prompt"}}
    queue = front.submit("one", features=features, capture=capture)
    front.step(rows(["one"], 0, len(PROMPT), 8, b""), EngineCoreOutput("one", [8], finish_reason=FinishReason.LENGTH))
    result = (await queue.get()).outputs[0].capture_results["memory"]
    assert result.token_ids("post_block", 1).tolist() == [PROMPT[0], -1, PROMPT[2]]


async def test_streamed_readouts_keep_captured_rows() -> None:
    """Catches captured rows that are dropped with the records that a stream has sent."""
    front = FrontEnd()
    capture = {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}
    queue = front.submit("one", capture=capture, readouts=READOUTS)
    feed = ReadoutFeed(front.processor.request_states["one"])
    for start, count in ((0, 3), (3, 1)):
        records = rows(["one"], start, count, width_of(readouts=READOUTS))
        front.step(records, rows(["one"], start, count, 8, b""), token("one", 8))
        assert feed.take_all()["mood"]["positions"] == list(range(start, start + count))
    front.step(rows(["one"], 4, 1, 8, b""), EngineCoreOutput("one", [8], finish_reason=FinishReason.LENGTH))
    result = (await queue.get()).outputs[0].capture_results["memory"]
    assert (result.error, result.tensor("post_block", 1)[:, 0].tolist()) == (None, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("answered", [True, False])
async def test_outputs_of_answered_samples_are_plain_until_the_last(
    answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches (1) work for outputs to which the HTTP response adds everything and (2) an end that it hides."""
    front, results = FrontEnd(), []
    queue = front.submit("one", readouts=READOUTS, capture={"memory": {"hooks": {"post_block": [1]}}})
    state = front.processor.request_states["one"]
    made: list[Any] = []
    if answered:
        ReadoutFeed(state)
        sample_of(state).listener = SimpleNamespace(on_results=results.append, on_reach=lambda _: None)
    ours = SteeredRequestState._new_completion_output
    counted = lambda self, *args: made.append(args) or ours(self, *args)  # noqa: E731
    monkeypatch.setattr(SteeredRequestState, "_new_completion_output", counted)
    for number in range(3):
        front.step(token("one", number))
    assert len(made) == (1 if answered else 3)
    front.step(EngineCoreOutput("one", [8], finish_reason=FinishReason.LENGTH))
    output = (await queue.get()).outputs[0]
    assert output.token_ids == [0, 1, 2, 8] and (output.readouts is None) == answered
    assert output.capture_results is not None and len(results) == answered


async def test_samples_have_their_own_rows() -> None:
    """Catches the rows of one sample under the number of another, in an output of several samples."""
    front, capture = FrontEnd(), {"memory": {"hooks": {"post_block": [1]}, "positions": "all_prompt"}}
    queue = front.submit("many", n=2, capture=capture)
    ends = [EngineCoreOutput(f"{i}_many", [8], finish_reason=FinishReason.LENGTH) for i in range(2)]
    front.step(rows(["1_many"], 1, 2, 8, b""), rows(["0_many"], 0, 3, 8, b""), *ends)
    results = {each.index: each.capture_results["memory"] for each in (await queue.get()).outputs}
    found = {index: (each.data.sample, each.positions("post_block", 1).tolist()) for index, each in results.items()}
    assert found == {0: (0, [0, 1, 2]), 1: (1, [1, 2])}


async def test_merged_outputs_of_samples() -> None:
    """Catches rows under another sample's number, and a trace lost because another sample goes on.

    vLLM merges outputs that a client has not read.
    """
    front = FrontEnd()
    capture = {"memory": {"hooks": {"post_block": [1]}, "positions": "all", "stream": True}}
    fields: dict[str, Any] = {"readouts": READOUTS, "steering": [add("all", live="calm")]}
    queue, width = front.submit("many", n=2, capture=capture, **fields), width_of(**fields)

    def both(name: str, start: int, count: int) -> tuple[EngineCoreOutput, ...]:
        return rows([name], start, count, 8, b""), rows([name], start, count, width)

    ended = EngineCoreOutput("0_many", [8], finish_reason=FinishReason.LENGTH)
    front.step(*both("0_many", 0, 3), *both("1_many", 1, 2), ended, token("1_many", 8))
    front.step(*both("1_many", 3, 1), token("1_many", 8))
    outputs = {each.index: each for each in (await queue.get()).outputs}
    found = {i: each.capture_rows["memory"]["post_block", 1].positions.tolist() for i, each in outputs.items()}
    assert found == {0: [0, 1, 2], 1: [1, 2, 3]}
    assert {i: each.readouts["mood"].positions.tolist() for i, each in outputs.items()} == found
    assert outputs[0].steering_trace is not None and outputs[1].steering_trace is None


@pytest.mark.parametrize("ended_by", ["readout", "length", "stop string"])
async def test_the_token_that_stops_has_rows(ended_by: str) -> None:
    """Catches the captured row of a stop's token missing, and an edit of that token reported as without effect.

    Without a stop of a readout, the last token is not forwarded, even if a client's stop string is the same text.
    """
    stops, reason = ended_by == "readout", stop_reason("mood", len(PROMPT) + 1, 4.0)
    front = FrontEnd()
    capture = {"memory": {"hooks": {"post_block": [1]}, "positions": "all_generated"}}
    last = len(PROMPT) + 1
    fields: dict[str, Any] = {"readouts": READOUTS, "stop_on": [{"readout": "mood", "above": 3.5}]}
    streamed = {"memory": {**capture["memory"], "stream": True}}
    width = width_of(**fields)
    for name, captured in (("whole", capture), ("streamed", streamed)):
        queue = front.submit(name, capture=captured, steering=[add([last]), add([last + 1])], **fields)
        for step, (start, count) in enumerate([(0, 3), (3, 1), (4, 1)]):
            row = rows([name], start, count, 8, b"")
            if step < 2:
                front.step(rows([name], start, count, width), row, token(name, 8))
            elif stops:
                ending = EngineCoreOutput(name, [], finish_reason=FinishReason.STOP, stop_reason=reason)
                front.step(rows([name], start, count, width), row, ending)
            elif ended_by == "length":
                front.step(EngineCoreOutput(name, [], finish_reason=FinishReason.LENGTH))
            else:
                front.processor.request_states[name].detokenizer.stop = [reason]
                front.step(EngineCoreOutput(name, [], finish_reason=FinishReason.STOP, stop_reason=reason))
        output = await queue.get()
        found, kept = output.outputs[0], [3, 4] if stops else [3]
        mood = found.readouts["mood"]
        assert mood.positions.tolist() == mood.values.tolist() == [0, 1, 2, *kept]
        unreached = ["steering[1]"] if stops else ["steering[0]", "steering[1]"]
        assert [each.edit for each in output.steering_applied.no_effect] == unreached
        result = found.capture_results["memory"]
        assert (result.status, result.unreached) == ("ok", ())
        if name == "whole":
            positions, captured_rows = result.positions("post_block", 1), result.tensor("post_block", 1)
        else:
            delta = found.capture_rows["memory"]["post_block", 1]
            positions, captured_rows = delta.positions, delta.rows
        assert positions.tolist() == captured_rows[:, 0].tolist() == kept

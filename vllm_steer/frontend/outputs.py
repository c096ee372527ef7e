# SPDX-License-Identifier: Apache-2.0
"""Captures and applied steering of running samples, from their start to their request outputs.

Everything is stored on vLLM's per-sample ``RequestState``, so it is freed with the sample, also after an abort or a
disconnect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_steer.capture.consumers.memory import is_streamed
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.readouts import Readouts, ReadoutStream, SteeringTrace
from vllm_steer.capture.record_reader import RecordReader
from vllm_steer.capture.results import NO_TOKEN, CaptureResults
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_deltas import RowDelta, RowDeltaStream
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.compat.internals import FinishReason, RequestOutputKind
from vllm_steer.engine.admission import REFUSED
from vllm_steer.frontend.context import capture_manager_of, context_of
from vllm_steer.frontend.controllers import ControlledRequest
from vllm_steer.frontend.prompt_tokens import token_mask, without_placeholders
from vllm_steer.frontend.reach import record_selections, unreached_edits
from vllm_steer.metrics.collectors import add, set_gauge
from vllm_steer.metrics.requests import count_gates
from vllm_steer.params import APPLIED_KEY, capture_specs, program_of, set_live_id
from vllm_steer.program import Program
from vllm_steer.registry.schema import SteeringApplied
from vllm_steer.request import CaptureSpec

ROW_RECEIVER = "_steering_rows"
"""Attribute of an output processor that has received captured rows."""
_APPLIED = "_steering_applied"
_CAPTURE = "_steering_capture"
_SUBMISSION = "_steering_submission"
_LISTENER = "_steering_results_listener"
_READ_ELSEWHERE = "_steering_records_read"
"""Attribute of a sample's state whose records the HTTP response reads."""
_STOPPED = "_steering_stopped"
"""Attribute of the state of a sample that a readout has ended."""
_CONTROLLER_ERROR = "_steering_controller_error"
_NO_CONTEXT: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class RunningCapture:
    """The captures and records of one running sample."""

    manager: CaptureManager
    receiver: RowReceiver
    assembler: RowAssembler
    specs: tuple[tuple[str, CaptureSpec], ...]
    streams: Mapping[str, RowDeltaStream]
    submission: int
    readouts: ReadoutStream | None
    controlled: bool = False
    """Whether a controller reads the readouts as well."""
    is_token: Sequence[bool] | None = None
    """Whether each position of the prompt has a token, not an embedding; None unless the prompt has both."""
    live_id: str = ""
    """The engine's id of the sample's live strengths; empty if it has none."""


def begin_capture(output_processor: Any, request: Any) -> None:
    """Start collecting the rows of a sample that captures."""
    specs = capture_specs(request.sampling_params)
    program = program_of(request.sampling_params)
    is_dynamic = program is not None and program.has_records
    if specs or is_dynamic:
        manager = capture_manager_of(output_processor)
        state = output_processor.request_states[request.request_id]
        assembler, receiver = manager.new_assembler(), _receiver(output_processor)
        receiver.add_request(request.request_id, assembler)
        streams = {name: RowDeltaStream(assembler, spec) for name, spec in specs if is_streamed(name, spec)}
        submission = _submission(manager, state)
        readouts = ReadoutStream(program, assembler) if program is not None and is_dynamic else None
        context = context_of(output_processor)
        controllers = None if context is None else context.controllers
        controlled = controllers is not None and readouts is not None and bool(readouts.live_names)
        controlled = controlled and bool(readouts and readouts.program.readouts)
        running = RunningCapture(
            manager,
            receiver,
            assembler,
            specs,
            streams,
            submission,
            readouts,
            controlled,
            is_token=token_mask(request),
            live_id=set_live_id(request) if readouts is not None and readouts.live_names else "",
        )
        setattr(state, _CAPTURE, running)
        if controllers is not None and controlled:
            names = live_names(state)
            controllers.begin(
                state, ControlledRequest(state_request_id(state), state.request_index, state.prompt_len, names), running
            )
        if specs:
            manager.begin(specs, state_request_id(state), state.request_index, submission)


def state_request_id(state: Any) -> str:
    """Return the id of a sample's request, as it was given to the engine client."""
    request_id: str = state.external_req_id if state.parent_req is None else state.parent_req.external_req_id
    return request_id


def _submission(manager: CaptureManager, state: Any) -> int:
    """Return the number of a sample's request among those that capture; samples of one request share it."""
    holder = state if state.parent_req is None else state.parent_req
    if (submission := getattr(holder, _SUBMISSION, None)) is None:
        submission = manager.next_submission()
        setattr(holder, _SUBMISSION, submission)
    return int(submission)


def record_applied(output_processor: Any, request: Any) -> None:
    """Store on a sample's state which steering was applied to its request."""
    data = (getattr(request.sampling_params, "extra_args", None) or {}).get(APPLIED_KEY)
    if data:
        state = output_processor.request_states[request.request_id]
        setattr(state, _APPLIED, SteeringApplied.model_validate_json(data))
        record_selections(output_processor, request)


def applied_steering(state: Any, finished: bool) -> SteeringApplied | None:
    """Return which steering was applied to the request of a sample.

    Args:
        state: The sample's state.
        finished: Whether all samples of the request have finished, so that unreached edits are known.
    """
    applied: SteeringApplied | None = getattr(state, _APPLIED, None)
    if applied is None or not finished or not (unreached := unreached_edits(state)):
        return applied
    return applied.model_copy(update={"no_effect": (*applied.no_effect, *unreached)})


def on_results(state: Any, listener: Callable[[Any, CaptureResults], None]) -> None:
    """Call ``listener(state, results)`` when a sample's captures have finished."""
    setattr(state, _LISTENER, listener)


def take_rows(output_processor: Any, outputs: Sequence[Any]) -> Sequence[Any]:
    """Take captured rows out of an engine's outputs and return the outputs of requests."""
    return _receiver(output_processor).receive(outputs)


def feed_controllers(output_processor: Any) -> None:
    """Pass the readouts of a step to the controller, if one is switched on."""
    context = context_of(output_processor)
    if context is not None and context.controllers is not None:
        context.controllers.feed(output_processor.request_states)


def record_controller_error(state: Any, problem: str) -> None:
    """Record why the controller of a sample has failed, for the sample's trace. Called in any thread."""
    setattr(state, _CONTROLLER_ERROR, problem)


def controller_error(state: Any) -> str | None:
    """Return why the controller of a sample has failed, or None."""
    problem: str | None = getattr(state, _CONTROLLER_ERROR, None)
    return problem


def consumers_paused(output_processor: Any) -> AbstractContextManager[None]:
    """Return a context in which consumers do not start work. Does nothing if no rows have been captured yet."""
    context = None if getattr(output_processor, ROW_RECEIVER, None) is None else context_of(output_processor)
    return _NO_CONTEXT if context is None else context.capture_manager.pause_consumers()


def _receiver(output_processor: Any) -> RowReceiver:
    receiver: RowReceiver | None = getattr(output_processor, ROW_RECEIVER, None)
    if receiver is None:
        context = context_of(output_processor)
        labels = {"model_name": "" if context is None else context.model_name}
        receiver = RowReceiver(lambda num_bytes: set_gauge("inbox_bytes", num_bytes, **labels))
        setattr(output_processor, ROW_RECEIVER, receiver)
    return receiver


def adds_to_outputs(state: Any) -> bool:
    """Return whether outputs of a sample carry rows or readouts before its end. Hot path: called for each token."""
    running: RunningCapture | None = state.__dict__.get(_CAPTURE)
    return running is not None and (running.readouts is not None or bool(running.streams))


def record_stop(state: Any, stop_reason: Any) -> None:
    """Record whether a readout has ended a sample; call before its last output is made."""
    running: RunningCapture | None = getattr(state, _CAPTURE, None)
    if running is None or running.readouts is None or not running.readouts.stopped_by(stop_reason):
        return
    # A client's stop string may begin with the same text. Requests without a tokenizer have none.
    if stop_reason not in getattr(state.detokenizer, "stop", ()):
        setattr(state, _STOPPED, True)
        add("readout_stops", model_name=running.manager.model_name)


def has_stopped(state: Any) -> bool:
    """Return whether a readout has ended a sample. Its last token has been forwarded then."""
    return hasattr(state, _STOPPED)


def num_forwarded(state: Any) -> int:
    """Return the number of tokens of a sample that have been forwarded and are final."""
    num_tokens: int = state.prompt_len + state.detokenizer.num_output_tokens()
    return num_tokens if has_stopped(state) else num_tokens - 1


def new_rows(state: Any) -> Mapping[str, RowDelta] | None:
    """Return the rows since a sample's last delta, by consumer, or None if the request does not stream rows."""
    running: RunningCapture | None = getattr(state, _CAPTURE, None)
    if running is None or not running.streams or state.output_kind != RequestOutputKind.DELTA:
        return None
    running.receiver.flush(state.request_id)
    num_tokens = num_forwarded(state) + 1
    return {name: stream.next_delta(state.prompt_len, num_tokens) for name, stream in running.streams.items()}


def live_names(state: Any) -> tuple[str, ...]:
    """Return the names of the live strengths of a sample's request."""
    running: RunningCapture | None = getattr(state, _CAPTURE, None)
    return () if running is None or running.readouts is None else running.readouts.live_names


def live_id_of(state: Any) -> str:
    """Return the engine's id of the live strengths of a sample, or an empty string if it has none."""
    running: RunningCapture | None = getattr(state, _CAPTURE, None)
    return "" if running is None else running.live_id


def live_program(state: Any) -> Program | None:
    """Return the program of a sample whose request has live strengths, or None."""
    running: RunningCapture | None = getattr(state, _CAPTURE, None)
    readouts = None if running is None else running.readouts
    return readouts.program if readouts is not None and readouts.live_names else None


def new_readouts(state: Any, *, finished: bool) -> tuple[Mapping[str, Readouts] | None, SteeringTrace | None]:
    """Return the readouts and the trace for an output of a sample, or None for each that it lacks.

    A delta has the values of the tokens since the last delta; the final output of other kinds has all of them. The
    trace comes with the final output.
    """
    running: RunningCapture | None = getattr(state, _CAPTURE, None)
    if running is None or running.readouts is None or hasattr(state, _READ_ELSEWHERE):
        return None, None
    delta = state.output_kind == RequestOutputKind.DELTA
    if not (delta or finished):
        return None, None
    running.receiver.flush(state.request_id)
    num_tokens = num_forwarded(state) + 1
    values = running.readouts.next_delta(state.prompt_len, num_tokens) if delta else None
    if not finished:
        return values, None
    whole, trace = running.readouts.result(state.prompt_len, num_tokens)
    if trace is not None:
        count_gates(running.manager.model_name, trace.num_covered, int(np.count_nonzero(trace.gates)))
        trace = replace(trace, controller_error=controller_error(state))
    return whole if values is None else values, trace


def is_dynamic(state: Any) -> bool:
    """Return whether the request of a sample has records."""
    running: RunningCapture | None = getattr(state, _CAPTURE, None)
    return running is not None and running.readouts is not None


def read_records(state: Any) -> tuple[Program, RecordReader]:
    """Return the program of a sample for which `is_dynamic` holds, and a reader of its records.

    The outputs of the sample carry no readouts from then on.
    """
    running: RunningCapture = getattr(state, _CAPTURE)
    if running.readouts is None:
        raise ValueError("the request has no records")
    setattr(state, _READ_ELSEWHERE, True)
    shared = bool(running.specs) or running.controlled
    return running.readouts.program, RecordReader(running.receiver, running.assembler, state.request_id, shared=shared)


def refusal(finish_reason: FinishReason | None, stop_reason: Any) -> str | None:
    """Return why our scheduler ended a request, or None if it did not.

    Checks ``finish_reason`` as well, because a client's stop string may begin with the same text.
    """
    if finish_reason != FinishReason.ERROR or not isinstance(stop_reason, str) or not stop_reason.startswith(REFUSED):
        return None
    return stop_reason.removeprefix(REFUSED)


def _cut_short(finish_reason: FinishReason, stop_reason: Any) -> str | None:
    """Return why a sample ended early, or None if it was completed."""
    if finish_reason == FinishReason.ABORT:
        return "the request was aborted"
    if finish_reason != FinishReason.ERROR:
        return None
    return refusal(finish_reason, stop_reason) or "the request ended with an error"


def finish_capture(state: Any, finish_reason: FinishReason, stop_reason: Any) -> CaptureResults | None:
    """Pass the captures of a sample that has ended to their consumers and return their results."""
    running: RunningCapture | None = getattr(state, _CAPTURE, None)
    if running is None:
        return None
    running.receiver.finish_request(state.request_id)
    if not running.specs:
        return None
    if (reason := _cut_short(finish_reason, stop_reason)) is not None:
        running.assembler.mark_incomplete(reason)
    prompt: Sequence[int] = [NO_TOKEN] * state.prompt_len
    if state.prompt_token_ids is not None:
        prompt = without_placeholders(state.prompt_token_ids, running.is_token)
    results = running.manager.submit(
        running.assembler,
        running.specs,
        last_forwarded=has_stopped(state),
        request_id=state_request_id(state),
        sample=state.request_index,
        submission=running.submission,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(state.detokenizer.output_token_ids),
    )
    listener: Callable[[Any, CaptureResults], None] | None = getattr(state, _LISTENER, None)
    if listener is not None:
        listener(state, results)
    return results

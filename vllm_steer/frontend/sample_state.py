# SPDX-License-Identifier: Apache-2.0
"""State of a running sample that has a program, from its start to its last output.

It is one object, an attribute of vLLM's per-sample ``RequestState``, so it is freed with the sample, also after an
abort or a disconnect. It has no reference to that state, which would delay this; methods get it as ``state``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from vllm_steer.capture.consumers.memory import is_streamed
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.readout_stream import ReadoutStream
from vllm_steer.capture.readouts import Readouts, SteeringTrace
from vllm_steer.capture.results import NO_TOKEN, CaptureResults
from vllm_steer.capture.row_assembler import RowAssembler, RowDelta, RowDeltaStream
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.compat.internals import FinishReason, RequestOutputKind
from vllm_steer.engine.admission import REFUSED
from vllm_steer.frontend.context import context_of
from vllm_steer.frontend.controllers import ControlledRequest
from vllm_steer.frontend.outputs import receiver_of
from vllm_steer.frontend.prompt_tokens import token_mask, without_placeholders
from vllm_steer.frontend.reach import NOTHING_SELECTED, Selections, Unreached, as_no_effect
from vllm_steer.metrics.collectors import add
from vllm_steer.metrics.requests import count_gates
from vllm_steer.params import APPLIED_KEY, Specs, capture_specs, program_of, set_live_id
from vllm_steer.program import Program
from vllm_steer.registry.schema import SteeringApplied

SAMPLE = "_steering_sample"
"""Attribute of vLLM's state of a sample."""
_REQUEST = "_steering_request"
"""Attribute of vLLM's parent of several samples: their `RequestState`."""


class SampleListener(Protocol):
    """Part of an HTTP response that follows a sample."""

    def on_reach(self, unreached: Unreached) -> None:
        """Take what the finished sample did not reach, if its program selects tokens."""

    def on_results(self, results: CaptureResults) -> None:
        """Take the results of the finished sample's captures.

        They are not read from request outputs, because vLLM merges outputs that a slow stream has not consumed.
        """


@dataclass(eq=False)
class SharedState:
    """State that the samples of one request share."""

    submission: int | None = None
    """Number of the request among those that capture; None until one of its samples starts."""
    unreached: dict[int, Unreached] = field(default_factory=dict)
    """Selections that finished samples did not reach, by number of the sample."""


@dataclass(frozen=True)
class RunningCapture:
    """The captures and records of one running sample."""

    manager: CaptureManager
    receiver: RowReceiver
    assembler: RowAssembler
    specs: Specs = ()
    streams: Mapping[str, RowDeltaStream] = field(default_factory=dict)
    readouts: ReadoutStream | None = None
    controlled: bool = False
    """Whether a controller reads the readouts as well."""
    is_token: Sequence[bool] | None = None
    """Whether each position of the prompt has a token, not an embedding; None unless the prompt has both."""


@dataclass(eq=False)
class SampleState:
    """State of one sample with a program."""

    shared: SharedState = field(default_factory=SharedState)
    applied_json: bytes = b""
    """Steering that was applied to the request; empty if none was."""
    selections: Selections = NOTHING_SELECTED
    """Selections of the request; empty if no steering was applied."""
    capture: RunningCapture | None = None
    """None without captures, readouts, gates and live strengths."""
    live_id: str = ""
    """The engine's id of the sample's live strengths; empty if it has none."""
    live_strengths: dict[str, float] = field(default_factory=dict)
    """The live strengths that have been changed."""
    listener: SampleListener | None = None
    refused_parents: list[str] | None = None
    """Gets the id of the sample's parent if the sample is refused; None if the request has no other samples."""
    has_stopped: bool = False
    """Whether a readout has ended the sample. Its last token has been forwarded then."""
    read_elsewhere: bool = False
    """Whether the HTTP response reads the readouts, so that outputs carry none."""
    controller_error: str | None = None
    """Error of the sample's controller. Set in any thread."""

    @cached_property
    def applied(self) -> SteeringApplied | None:
        """Steering that was applied to the request. HTTP responses have `applied_json` instead."""
        return SteeringApplied.model_validate_json(self.applied_json) if self.applied_json else None

    @property
    def readouts(self) -> ReadoutStream | None:
        """The readouts of the outputs; None if the request has no records."""
        return None if self.capture is None else self.capture.readouts

    @property
    def live_names(self) -> tuple[str, ...]:
        """Names of the live strengths."""
        return () if self.readouts is None else tuple(self.readouts.program.layout.live)

    @property
    def adds_to_outputs(self) -> bool:
        """Whether outputs carry rows or readouts before the last one. Hot path: read for each token."""
        capture = self.capture
        if capture is None:
            return False
        return bool(capture.streams) or (capture.readouts is not None and not self.read_elsewhere)

    def applied_when(self, finished: bool) -> SteeringApplied | None:
        """Return the applied steering, with what no token reached if all samples of the request have finished."""
        applied = self.applied
        if applied is None or not finished or not self.shared.unreached:
            return applied
        return applied.model_copy(update={"no_effect": (*applied.no_effect, *as_no_effect(self.shared.unreached))})

    def num_forwarded(self, state: Any) -> int:
        """Return the number of tokens that have been forwarded and are final."""
        num_tokens: int = state.prompt_len + state.detokenizer.num_output_tokens()
        return num_tokens if self.has_stopped else num_tokens - 1

    def new_rows(self, state: Any) -> Mapping[str, RowDelta] | None:
        """Return the rows since the last delta, by consumer, or None if the request does not stream rows."""
        capture = self.capture
        if capture is None or not capture.streams or state.output_kind != RequestOutputKind.DELTA:
            return None
        capture.receiver.flush(state.request_id)
        num_tokens = self.num_forwarded(state) + 1
        return {name: stream.next_delta(state.prompt_len, num_tokens) for name, stream in capture.streams.items()}

    def new_readouts(self, state: Any, *, finished: bool) -> tuple[Mapping[str, Readouts] | None, SteeringTrace | None]:
        """Return the readouts and the trace for an output, or None for each that it lacks.

        A delta has the values of the tokens since the last delta; the final output of other kinds has all of them. The
        trace comes with the final output.
        """
        capture, readouts = self.capture, self.readouts
        delta = state.output_kind == RequestOutputKind.DELTA
        if capture is None or readouts is None or self.read_elsewhere or not (delta or finished):
            return None, None
        capture.receiver.flush(state.request_id)
        forwarded = self.num_forwarded(state)
        values = readouts.next_delta(forwarded) if delta else readouts.whole(forwarded)
        return values, self.final_trace(state) if finished else None

    def final_trace(self, state: Any) -> SteeringTrace | None:
        """Return the trace of a sample that ends, and count its gates; None without gated and live edits."""
        capture, readouts = self.capture, self.readouts
        if capture is None or readouts is None or not readouts.has_trace:
            return None
        capture.receiver.flush(state.request_id)
        trace = readouts.trace(self.num_forwarded(state))
        count_gates(capture.manager.model_name, trace.num_covered, int(np.count_nonzero(trace.gates)))
        return replace(trace, controller_error=self.controller_error)

    def record_stop(self, state: Any, stop_reason: Any) -> None:
        """Record whether a readout has ended the sample; call before its last output is made."""
        capture = self.capture
        if capture is None or capture.readouts is None or not capture.readouts.stopped_by(stop_reason):
            return
        # A client's stop string may begin with the same text. Requests without a tokenizer have none.
        if stop_reason not in getattr(state.detokenizer, "stop", ()):
            self.has_stopped = True
            add("readout_stops", model_name=capture.manager.model_name)

    def record_reach(self, state: Any) -> None:
        """Record what the sample, which has finished, did not reach."""
        if not any(self.selections):
            return
        unreached = self.selections.unreached(state, self.num_forwarded(state))
        if unreached:
            self.shared.unreached[state.request_index] = unreached
        if self.listener is not None:
            self.listener.on_reach(unreached)

    def finish_capture(self, state: Any, finish_reason: FinishReason | None, stop_reason: Any) -> CaptureResults | None:
        """Pass the captures of the sample, which has ended, to their consumers and return their results."""
        capture = self.capture
        if capture is None:
            return None
        if capture.specs or not self.read_elsewhere:  # the response reads its last records itself
            capture.receiver.finish_request(state.request_id)
        if not capture.specs:
            return None
        if (reason := _cut_short(finish_reason, stop_reason)) is not None:
            capture.assembler.incomplete_reason = reason
        prompt: Sequence[int] = [NO_TOKEN] * state.prompt_len
        if state.prompt_token_ids is not None:
            prompt = without_placeholders(state.prompt_token_ids, capture.is_token)
        results = capture.manager.submit(
            capture.assembler,
            capture.specs,
            last_forwarded=self.has_stopped,
            request_id=state_request_id(state),
            sample=state.request_index,
            submission=self.shared.submission,
            prompt_token_ids=tuple(prompt),
            output_token_ids=tuple(state.detokenizer.output_token_ids),
        )
        if self.listener is not None:
            self.listener.on_results(results)
        return results


def sample_of(state: Any) -> SampleState | None:
    """Return what this package keeps for the sample of one of vLLM's states; None if the sample has no program."""
    sample: SampleState | None = state.__dict__.get(SAMPLE)
    return sample


def state_request_id(state: Any) -> str:
    """Return the id of a sample's request, as it was given to the engine client."""
    request_id: str = state.external_req_id if state.parent_req is None else state.parent_req.external_req_id
    return request_id


def attach_sample(output_processor: Any, request: Any) -> SampleState | None:
    """Attach its `SampleState` to a sample that vLLM's output processor has just added, if the sample has a program.

    Rows of the sample are collected from now on, consumers hear of it, and its controller starts.
    """
    program = program_of(request.sampling_params)
    if program is None:
        return None
    state = output_processor.request_states[request.request_id]
    sample = SampleState()
    if state.parent_req is not None:
        sample.shared = vars(state.parent_req).setdefault(_REQUEST, sample.shared)
    setattr(state, SAMPLE, sample)
    if applied := (request.sampling_params.extra_args or {}).get(APPLIED_KEY):
        sample.applied_json = applied
        sample.selections = Selections(program.selections, program.selected_parts)
    specs = capture_specs(request.sampling_params)
    if specs or program.has_records:
        _begin_capture(output_processor, request, sample, program, specs)
    return sample


def _begin_capture(output_processor: Any, request: Any, sample: SampleState, program: Program, specs: Specs) -> None:
    """Start collecting the rows of a sample."""
    state, context = output_processor.request_states[request.request_id], context_of(output_processor)
    if context is None:
        raise RuntimeError("a sample captures without steering")
    manager, receiver = context.capture_manager, receiver_of(output_processor)
    assembler = manager.new_assembler()
    receiver.add_request(request.request_id, assembler)
    readouts = ReadoutStream(program, assembler, state.prompt_len) if program.has_records else None
    controlled = context.controllers is not None and bool(program.layout.live) and bool(program.readouts)
    sample.capture = RunningCapture(
        manager,
        receiver,
        assembler,
        specs,
        {name: RowDeltaStream(assembler, spec) for name, spec in specs if is_streamed(name, spec)},
        readouts,
        controlled,
        token_mask(request),
    )
    if readouts is not None and sample.live_names:
        sample.live_id = set_live_id(request)
    request_id, number = state_request_id(state), state.request_index
    if context.controllers is not None and controlled:
        about = ControlledRequest(request_id, number, state.prompt_len, sample.live_names)
        context.controllers.begin(state, about, sample)
    if sample.shared.submission is None:
        sample.shared.submission = manager.next_submission()
    if specs:
        manager.begin(specs, request_id, number, sample.shared.submission)


def refusal(finish_reason: FinishReason | None, stop_reason: Any) -> str | None:
    """Return why our scheduler ended a request, or None if it did not.

    Checks ``finish_reason`` as well, because a client's stop string may begin with the same text.
    """
    if finish_reason != FinishReason.ERROR or not isinstance(stop_reason, str) or not stop_reason.startswith(REFUSED):
        return None
    return stop_reason.removeprefix(REFUSED)


def _cut_short(finish_reason: FinishReason | None, stop_reason: Any) -> str | None:
    """Return why a sample ended early, or None if it was completed."""
    if finish_reason == FinishReason.ABORT:
        return "the request was aborted"
    if finish_reason != FinishReason.ERROR:
        return None
    return refusal(finish_reason, stop_reason) or "the request ended with an error"

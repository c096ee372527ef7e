# SPDX-License-Identifier: Apache-2.0
"""Captures on vLLM's output path: taking rows out of engine outputs, and results onto request outputs.

Called from the wrapped methods of ``plugin.py``. Everything is kept on vLLM's own per-sample ``RequestState``, so it
ends when vLLM forgets the sample: after an abort or a client that went away, nothing is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from vllm_steer.capture.assembly import Assembly
from vllm_steer.capture.consumers.memory import is_streamed
from vllm_steer.capture.deltas import NewRows, RowDeltas
from vllm_steer.capture.manager import CaptureManager, CaptureResults
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.engine.admission import REFUSED
from vllm_steer.frontend.context import capture_manager_of, context_of
from vllm_steer.metrics.collectors import set_gauge
from vllm_steer.params import capture_specs
from vllm_steer.spec import CaptureSpec

_RUNNING = "_steering_capture"
INBOX = "_steering_rows"
_NOTHING_TO_HOLD: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class RunningCapture:
    """The captures of one sample in flight."""

    desk: CaptureManager
    inbox: RowReceiver
    assembly: Assembly
    specs: tuple[tuple[str, CaptureSpec], ...]
    streams: Mapping[str, RowDeltas]


def begin(output_processor: Any, request: Any) -> None:
    """A sample has been added to the output processor."""
    specs = capture_specs(request.sampling_params)
    if specs:
        desk = capture_manager_of(output_processor)
        state = output_processor.request_states[request.request_id]
        assembly, inbox = desk.begin(), _inbox(output_processor)
        inbox.follow(request.request_id, assembly)
        streams = {name: RowDeltas(assembly, spec) for name, spec in specs if is_streamed(name, spec)}
        setattr(state, _RUNNING, RunningCapture(desk, inbox, assembly, specs, streams))


def take_rows(output_processor: Any, outputs: Sequence[Any]) -> Sequence[Any]:
    """Take captured rows out of an engine's outputs; returns those that are of requests."""
    return _inbox(output_processor).restore_program(outputs)


def consumers_held_back(output_processor: Any) -> AbstractContextManager[None]:
    """While a step's outputs are processed; nothing where nobody has ever read."""
    served = None if getattr(output_processor, INBOX, None) is None else context_of(output_processor)
    return _NOTHING_TO_HOLD if served is None else served.desk.held_back()


def _inbox(output_processor: Any) -> RowReceiver:
    inbox: RowReceiver | None = getattr(output_processor, INBOX, None)
    if inbox is None:
        served = context_of(output_processor)
        labels = {"model_name": "" if served is None else served.model_name}
        inbox = RowReceiver(lambda num_bytes: set_gauge("inbox_bytes", num_bytes, **labels))
        setattr(output_processor, INBOX, inbox)
    return inbox


def new_rows(state: Any) -> Mapping[str, NewRows] | None:
    """What is new of a sample whose output is a piece of a stream, by consumer, where a request wants that."""
    running: RunningCapture | None = getattr(state, _RUNNING, None)
    if running is None or not running.streams or state.output_kind != RequestOutputKind.DELTA:
        return None
    running.inbox.settle(state.request_id)
    num_tokens = state.prompt_len + len(state.detokenizer.output_token_ids)
    return {name: stream.take(state.prompt_len, num_tokens) for name, stream in running.streams.items()}


def refusal(finish_reason: FinishReason | None, stop_reason: Any) -> str | None:
    """Why our scheduler ended a request, or None where it did not: a stop string of a client's may begin alike."""
    if finish_reason != FinishReason.ERROR or not isinstance(stop_reason, str) or not stop_reason.startswith(REFUSED):
        return None
    return stop_reason.removeprefix(REFUSED)


def _cut_short(finish_reason: FinishReason, stop_reason: Any) -> str | None:
    """Why a sample ended before it was through, or None."""
    if finish_reason == FinishReason.ABORT:
        return "the request was aborted"
    if finish_reason != FinishReason.ERROR:
        return None
    return refusal(finish_reason, stop_reason) or "the request ended with an error"


def finish(state: Any, finish_reason: FinishReason, stop_reason: Any) -> CaptureResults | None:
    """A sample has finished, or was ended: hand its captures to their consumers."""
    running: RunningCapture | None = getattr(state, _RUNNING, None)
    if running is None:
        return None
    running.inbox.end(state.request_id)
    if (reason := _cut_short(finish_reason, stop_reason)) is not None:
        running.assembly.cut(reason)
    prompt = state.prompt_token_ids if state.prompt_token_ids is not None else [0] * state.prompt_len
    return running.desk.finish(
        running.assembly,
        running.specs,
        request_id=state.external_req_id if state.parent_req is None else state.parent_req.external_req_id,
        sample=state.request_index,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(state.detokenizer.output_token_ids),
    )

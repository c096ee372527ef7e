# SPDX-License-Identifier: Apache-2.0
"""Captures on vLLM's output path: taking rows out of engine outputs, and results onto request outputs.

Called from the wrapped methods of ``plugin.py``. Everything is kept on vLLM's own per-sample ``RequestState``, so it
ends when vLLM forgets the sample: after an abort or a client that went away, nothing is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_steer.capture.assemble import Assembly
from vllm_steer.capture.desk import CaptureDesk, CaptureResults
from vllm_steer.engine.outbox import OUTPUT_KEY
from vllm_steer.frontend import desk_of
from vllm_steer.params import capture_specs
from vllm_steer.spec import CaptureSpec

_RUNNING = "_steering_capture"


@dataclass(frozen=True)
class RunningCapture:
    """The captures of one sample in flight."""

    desk: CaptureDesk
    assembly: Assembly
    specs: tuple[tuple[str, CaptureSpec], ...]


def begin(output_processor: Any, request: Any) -> None:
    """A sample has been added to the output processor."""
    specs = capture_specs(request.sampling_params)
    if specs:
        desk = desk_of(output_processor)
        state = output_processor.request_states[request.request_id]
        setattr(state, _RUNNING, RunningCapture(desk, desk.begin(), specs))


def take_rows(state: Any, transfer_params: dict[str, Any] | None) -> dict[str, Any] | None:
    """Take rows out of an engine output; returns what of ``kv_transfer_params`` is not ours."""
    if not transfer_params or OUTPUT_KEY not in transfer_params:
        return transfer_params
    rest = dict(transfer_params)
    chunks = rest.pop(OUTPUT_KEY)
    running: RunningCapture | None = getattr(state, _RUNNING, None)
    if running is not None:
        running.assembly.add(chunks)
    return rest or None


def finish(state: Any) -> CaptureResults | None:
    """A sample has finished: hand its captures to their consumers."""
    running: RunningCapture | None = getattr(state, _RUNNING, None)
    if running is None:
        return None
    prompt = state.prompt_token_ids if state.prompt_token_ids is not None else [0] * state.prompt_len
    return running.desk.finish(
        running.assembly,
        running.specs,
        request_id=state.external_req_id if state.parent_req is None else state.parent_req.external_req_id,
        sample=state.request_index,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(state.detokenizer.output_token_ids),
    )

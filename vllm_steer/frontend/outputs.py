# SPDX-License-Identifier: Apache-2.0
"""Captured rows among the outputs of an engine, ahead of vLLM's output processor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.frontend.context import context_of
from vllm_steer.metrics.collectors import set_gauge

ROW_RECEIVER = "_steering_rows"
"""Attribute of an output processor that has received captured rows."""
_NO_CONTEXT: AbstractContextManager[None] = nullcontext()


def take_rows(output_processor: Any, outputs: Sequence[Any]) -> Sequence[Any]:
    """Take captured rows out of an engine's outputs and return the outputs of requests."""
    return receiver_of(output_processor).receive(outputs)


def feed_controllers(output_processor: Any) -> None:
    """Pass the readouts of a step to the controller, if one is switched on."""
    context = context_of(output_processor)
    if context is not None and context.controllers is not None:
        context.controllers.feed(output_processor.request_states)


def consumers_paused(output_processor: Any) -> AbstractContextManager[None]:
    """Return a context in which consumers do not start work. Does nothing if no rows have been captured yet."""
    context = None if getattr(output_processor, ROW_RECEIVER, None) is None else context_of(output_processor)
    return _NO_CONTEXT if context is None else context.capture_manager.pause_consumers()


def receiver_of(output_processor: Any) -> RowReceiver:
    """Return the receiver of rows of an output processor, which is created when it is first needed."""
    receiver: RowReceiver | None = getattr(output_processor, ROW_RECEIVER, None)
    if receiver is None:
        context = context_of(output_processor)
        labels = {"model_name": "" if context is None else context.model_name}
        receiver = RowReceiver(lambda num_bytes: set_gauge("inbox_bytes", num_bytes, **labels))
        setattr(output_processor, ROW_RECEIVER, receiver)
    return receiver

# SPDX-License-Identifier: Apache-2.0
"""What is known about the HTTP request that the running code serves.

vLLM's request objects know neither the server nor the engine. The middleware, which knows both, leaves them
here for the code that turns request objects into sampling parameters.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from vllm_steer.frontend import Served


@dataclass
class Exchange:
    """One HTTP request; shared by all tasks that work on it."""

    fields: tuple[str, ...] = ()
    """Steering fields of the body."""
    served: Served | None = None
    """What the engine serves, once asked."""
    prompt_len: int | None = None
    """Length in tokens of the prompt whose sampling parameters are made next; None where it is not known."""
    compiled: dict[str, bytes] | None = None
    """The fields, compiled: an HTTP request has them once, for however many prompts."""
    applied: bool = False
    """Whether sampling parameters were made that carry the fields."""


current: ContextVar[Exchange | None] = ContextVar("vllm_steer_exchange", default=None)


def note_prompt_len(length: int) -> None:
    """To be called with the length of each prompt before its sampling parameters are made."""
    exchange = current.get()
    if exchange is not None:
        exchange.prompt_len = length

# SPDX-License-Identifier: Apache-2.0
"""What is known about the HTTP request that the running code serves.

vLLM's request objects know neither the server nor the engine. The middleware, which knows both, leaves them
here for the code that turns request objects into sampling parameters. In the other direction, what was captured
comes here from vLLM's output processor, past the serving code, which has no place for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm_steer.capture.desk import CaptureResults
from vllm_steer.frontend import Served

PROMPT_KEY = "steer_prompt"
"""In ``extra_args`` of a request with captures: which of the body's prompts it is for, from 0."""

_CHOICE = "_steering_choice"


@dataclass
class Exchange:
    """One HTTP request; shared by all tasks that work on it."""

    fields: tuple[str, ...] = ()
    """Steering and capture fields of the body."""
    served: Served | None = None
    """What the engine serves, once asked."""
    prompt_len: int | None = None
    """Length in tokens of the prompt whose sampling parameters are made next; None where it is not known."""
    compiled: Mapping[str, bytes] | None = None
    """The fields, compiled: an HTTP request has them once, for however many prompts."""
    applied: bool = False
    """Whether sampling parameters were made that carry the fields."""
    consumers: tuple[str, ...] = ()
    """Those that ``capture`` names, once it is applied: the answer has to carry what they report."""
    samples: int = 1
    """How many choices each prompt has."""
    prompts: int = 0
    """For how many prompts sampling parameters with captures were made."""
    results: dict[int, CaptureResults] = field(default_factory=dict)
    """What was captured, by choice: all samples of the first prompt, then those of the second."""


current: ContextVar[Exchange | None] = ContextVar("vllm_steer_exchange", default=None)


def note_prompt_len(length: int) -> None:
    """To be called with the length of each prompt before its sampling parameters are made."""
    exchange = current.get()
    if exchange is not None:
        exchange.prompt_len = length


def follow(output_processor: Any, request: Any) -> None:
    """A sample has been added to vLLM's output processor: remember which choice of the answer it is."""
    exchange = current.get()
    if exchange is None or not exchange.consumers or request.sampling_params is None:
        return
    prompt = (request.sampling_params.extra_args or {}).get(PROMPT_KEY)
    if isinstance(prompt, int):
        state = output_processor.request_states[request.request_id]
        setattr(state, _CHOICE, (exchange, prompt * exchange.samples + state.request_index))


def note_results(state: Any, results: CaptureResults | None) -> None:
    """A sample has finished, with these results.

    They are not taken from request outputs on their way: vLLM merges those that a slow stream has not read yet.
    """
    # The output processor runs in the context of whichever request came first: `current` is not to be trusted here.
    exchange, choice = getattr(state, _CHOICE, (None, 0))
    if exchange is not None and results is not None:
        exchange.results[choice] = results

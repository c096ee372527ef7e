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
from typing import Any, Literal, TypeAlias

from vllm_steer.capture.manager import CaptureResults
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext
from vllm_steer.params import APPLIED_KEY, EXTRA_KEY
from vllm_steer.server.auth.current_key import NO_OWNER
from vllm_steer.server.quota.tracker import Reservation

PROMPT_KEY = "steer_prompt"
"""In ``extra_args`` of a request with captures: which of the body's prompts it is for, from 0."""

_CHOICE = "_steering_choice"

Answer: TypeAlias = Literal["choices", "response"]


@dataclass
class RequestContext:
    """One HTTP request; shared by all tasks that work on it."""

    fields: tuple[str, ...] = ()
    """Steering and capture fields of the body."""
    served: EngineContext | None = None
    """What the engine serves, once asked."""
    hold: Reservation | None = None
    """What the request takes of the server's limits; None where none are kept, as in a batch run."""
    owner: bytes = NO_OWNER
    """Whose captures are that are kept to be fetched."""
    store_bytes: int | None = None
    """How much of them the owner may have; None for no limit of its own."""
    refusal: SteeringError | None = None
    """Why the fields were refused where sampling parameters are made: what vLLM answers has not its status."""
    prompt_len: int | None = None
    """Length in tokens of the prompt whose sampling parameters are made next; None where it is not known."""
    compiled: Mapping[str, bytes] | None = None
    """The fields, compiled, with all that applies beside them: an HTTP request has them once, for all its prompts."""
    steering: bytes | None = None
    """What was applied, as JSON, once a sample has been given to the engine."""
    applied: bool = False
    """Whether sampling parameters were made that carry the fields."""
    needs_room: bool = False
    """Whether the engine was given a program of it, be it global steering or captures of every request: such a one
    may wait for its places until its time is over."""
    consumers: tuple[str, ...] = ()
    """Those that ``capture`` names, once it is applied: the answer has to carry what they report."""
    samples: int = 1
    """How many choices each prompt has."""
    prompts: int = 0
    """For how many prompts sampling parameters with captures were made."""
    answer: Answer = "choices"
    """Where an answer carries results: in each of its choices, or, of the responses API, at its top."""
    results: dict[int, CaptureResults] = field(default_factory=dict)
    """What was captured, by choice: all samples of the first prompt, then those of the second."""
    repeated: set[int] = field(default_factory=set)
    """Choices for which the model ran more than once."""
    ended: bool = False
    """Whether nobody waits for results any more."""

    def end(self) -> None:
        """The answer is out. vLLM starts tasks in the context of the first request that live as long as the server,
        and whatever its exchange still held would live with them."""
        self.ended = True
        self.results.clear()
        self.compiled = self.steering = None


current: ContextVar[RequestContext | None] = ContextVar("vllm_steer_exchange", default=None)


def note_prompt_len(length: int) -> None:
    """To be called with the length of each prompt before its sampling parameters are made."""
    exchange = current.get()
    if exchange is not None:
        exchange.prompt_len = length


def track_sample(output_processor: Any, request: Any) -> None:
    """A sample has been added to vLLM's output processor: remember which choice of the answer it is."""
    exchange = current.get()
    if exchange is None or request.sampling_params is None:
        return
    extra = request.sampling_params.extra_args or {}
    exchange.steering = extra.get(APPLIED_KEY) or exchange.steering
    exchange.needs_room = exchange.needs_room or EXTRA_KEY in extra
    if not exchange.consumers:
        return
    prompt = extra.get(PROMPT_KEY)
    if isinstance(prompt, int):
        state = output_processor.request_states[request.request_id]
        setattr(state, _CHOICE, (exchange, prompt * exchange.samples + state.request_index))


def note_results(state: Any, results: CaptureResults | None) -> None:
    """A sample has finished, with these results.

    They are not taken from request outputs on their way: vLLM merges those that a slow stream has not read yet.
    """
    # The output processor runs in the context of whichever request came first: `current` is not to be trusted here.
    exchange, choice = getattr(state, _CHOICE, (None, 0))
    # What a client left may be aborted only when its answer is over.
    if exchange is not None and results is not None and not exchange.ended:
        if choice in exchange.results:
            exchange.repeated.add(choice)
        exchange.results[choice] = results

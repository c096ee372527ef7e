# SPDX-License-Identifier: Apache-2.0
"""State of the current HTTP request, shared between the middleware and vLLM's serving code.

vLLM's request objects know neither the server nor the engine. The middleware stores both here for the code that
creates sampling parameters. In the other direction, the output processor stores captured results here, because vLLM's
response objects have no field for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from vllm_steer.capture.results import CaptureResults
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext
from vllm_steer.frontend.live import LiveSample
from vllm_steer.frontend.reach import Unreached, as_no_effect
from vllm_steer.frontend.sample_state import sample_of, state_request_id
from vllm_steer.params import APPLIED_KEY, PROGRAM_KEY, PROMPT_KEY
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.server.auth.current_key import NO_OWNER
from vllm_steer.server.capture_store import CaptureStore
from vllm_steer.server.http.readout_feed import ReadoutFeed
from vllm_steer.server.http.running_requests import RunningRequest, RunningRequests
from vllm_steer.server.quota.tracker import Reservation

APPLIED_FIELD = "steering_applied"
"""The response field that tells what was applied to a request."""
RERUN = "the server ran the model several times for this choice (server-side tools); which run to report is undefined"
"""Error in place of captures and trace of a choice."""

ResultsLocation: TypeAlias = Literal["choices", "response"]


@dataclass
class RequestContext:
    """State of one HTTP request, shared by all tasks that work on it."""

    fields: tuple[str, ...] = ()
    """Names of the steering and capture fields in the body."""
    engine: EngineContext | None = None
    """Capabilities and registry of the engine; None if unknown."""
    snapshot: Snapshot | None = None
    """State of the registry when the request arrived, if reading it can wait for another machine; otherwise None."""
    reservation: Reservation | None = None
    """Resources reserved for this request; None without quotas, as in a batch run."""
    owner: bytes = NO_OWNER
    """Owner of the captures that this request stores."""
    capture_store: Callable[[], CaptureStore] | None = None
    """Returns the server's store of captures; None outside of a server."""
    store_rows: bool = False
    """Whether captured rows are stored whatever their size."""
    store_bytes: int | None = None
    """Maximum bytes of stored captures for the owner; None for no limit per owner."""
    refusal: SteeringError | None = None
    """Error raised while creating sampling parameters. vLLM's own response loses its status."""
    prompt_len: int | None = None
    """Token count of the prompt whose sampling parameters are created next; None if unknown."""
    prompt: Mapping[str, Any] | None = None
    """The prompt of ``prompt_len`` as vLLM gives it to the engine; None if unknown."""
    input_processor: Any = None
    """The engine's input processor, which has the tokenizer; None if unknown."""
    own: tuple[Mapping[str, Any], Mapping[str, bytes]] | None = None
    """The fields without options of the server, and what they compile to, once they are compiled."""
    compiled: Mapping[str, bytes] | None = None
    """Compiled fields, including modules and global steering. Compiled once for all prompts of the body."""
    shared: Mapping[str, bytes] | None = None
    """Global steering of prompts whose parameters were made without the fields, such as the clips of a recording."""
    beam_search: bool = False
    """Whether the engine gets a request for each step of each beam; all of them take ``compiled``."""
    applied_json: bytes | None = None
    """The applied field as JSON; set before the first byte of the response."""
    fields_applied: bool = False
    """Whether sampling parameters that carry the fields were created."""
    has_program: bool = False
    """Whether the engine received a program for this request, including global steering and server-wide captures.
    Such a request can time out in the admission queue."""
    consumers: tuple[str, ...] = ()
    """Consumers named by ``capture``, once it is applied. The response must carry their results."""
    dynamic: bool = False
    """Whether the applied program has readouts, gates or live strengths, which the response must carry."""
    samples: int = 1
    """Number of samples per prompt."""
    prompts: int = 0
    """Number of prompts whose sampling parameters capture."""
    results_in: ResultsLocation = "choices"
    """Location of results in a JSON response: each choice, or the top level (responses API)."""
    results: dict[int, CaptureResults] = field(default_factory=dict)
    """Captured results by choice: all samples of the first prompt, then all samples of the second."""
    readouts: dict[int, ReadoutFeed] = field(default_factory=dict)
    """Readouts by choice, in the order of ``results``."""
    unreached: dict[int, Unreached] = field(default_factory=dict)
    """Edits that each finished choice did not reach."""
    rerun_choices: set[int] = field(default_factory=set)
    """Choices for which the model ran more than once."""
    running: RunningRequest | None = None
    """Entry of this request in ``directory``; None until it steers."""
    directory: RunningRequests | None = None
    """Running requests of this process; None outside of a server."""
    route: str = ""
    """Path of the route; empty outside of a server."""
    header_id: str | None = None
    """``X-Request-Id``, on routes where vLLM ignores it."""
    closed: bool = False
    """Whether the response is complete; later results are dropped."""

    async def use_engine(self, engine: EngineContext | None) -> None:
        """Set the engine and load its current modules and global steering, in a thread if that can wait.

        Raises:
            SteeringError: The registry cannot be read.
        """
        self.engine = engine
        if engine is not None:
            snapshot = await engine.registry.refresh()
            self.snapshot = snapshot if engine.registry.is_remote else None

    @property
    def changes_nothing(self) -> bool:
        """Whether the response gets no fields of ours: the request is composed, and nothing applies to it."""
        composed = self.compiled is not None and APPLIED_KEY in self.compiled
        return composed and self.applied_json is None and not self.consumers and not self.dynamic

    def final_applied_json(self) -> bytes | None:
        """Return the applied field as JSON with the edits that no token reached, once the choices have finished."""
        if self.applied_json is None or not any(self.unreached.values()):
            return self.applied_json
        applied = msgspec.json.decode(self.applied_json)
        unreached = [each.model_dump(exclude_none=True) for each in as_no_effect(self.unreached)]
        return msgspec.json.encode({**applied, "no_effect": [*applied.get("no_effect", ()), *unreached]})

    def close(self) -> None:
        """Drop all results.

        vLLM starts long-lived tasks in the context of the first request; without this, its results would stay in memory
        as long as the server runs.
        """
        self.closed = True
        if self.directory is not None and self.running is not None:
            self.directory.remove(self.running)
        self.results.clear()
        self.readouts.clear()
        self.unreached.clear()
        self.own = self.prompt = self.input_processor = None
        self.compiled = self.shared = self.applied_json = None


current_request: ContextVar[RequestContext | None] = ContextVar("vllm_steer_request", default=None)


def set_prompt_len(length: int) -> None:
    """Record the token count of a prompt. Called before its sampling parameters are created."""
    context = current_request.get()
    if context is not None:
        context.prompt_len = length


def record_prompt(original: Callable[..., int], serving: Any, prompt: Any, *args: Any, **kwargs: Any) -> int:
    """Run vLLM's ``_extract_prompt_len``, and record the prompt for the parameters that are created next."""
    length = original(serving, prompt, *args, **kwargs)
    set_prompt_len(length)
    context = current_request.get()
    if context is not None and isinstance(prompt, Mapping):
        context.prompt = prompt
        context.input_processor = getattr(getattr(serving, "engine_client", None), "input_processor", None)
    return length


def track_sample(output_processor: Any, request: Any) -> None:
    """Record which choice of the response belongs to a sample that was added to vLLM's output processor."""
    context = current_request.get()
    if context is None or request.sampling_params is None:
        return
    extra = request.sampling_params.extra_args or {}
    context.applied_json = extra.get(APPLIED_KEY) or context.applied_json
    context.has_program = context.has_program or PROGRAM_KEY in extra
    prompt = extra.get(PROMPT_KEY)
    if not isinstance(prompt, int):
        return
    state = output_processor.request_states[request.request_id]
    sample, number = sample_of(state), prompt * context.samples + state.request_index
    if context.directory is not None and not context.closed:
        context.running = context.running or RunningRequest(context.owner, context.route, context.header_id)
        live_id = "" if sample is None else sample.live_id
        context.directory.add_sample(context.running, state_request_id(state), LiveSample(request.request_id, live_id))
    if sample is None:
        return
    sample.listener = Choice(context, number)
    if context.dynamic and not context.closed and sample.readouts is not None:
        context.readouts[number] = ReadoutFeed(state, RERUN if number in context.readouts else None)


class Choice(NamedTuple):
    """The choice of a response that follows a sample.

    The output processor runs in the context of an arbitrary request, so `current_request` cannot be used here.
    """

    context: RequestContext
    number: int

    def on_reach(self, unreached: Unreached) -> None:
        """Record the edits that the finished sample did not reach."""
        if not self.context.closed:
            # With server-side tools the model runs several times for a choice; an edit may reach tokens in any run.
            earlier = self.context.unreached.get(self.number, unreached)
            self.context.unreached[self.number] = tuple(each for each in unreached if each in earlier)

    def on_results(self, results: CaptureResults) -> None:
        """Record the results of the finished sample, if the response reports captures."""
        # After a disconnect, vLLM may abort the request later than the response ends.
        if self.context.consumers and not self.context.closed:
            if self.number in self.context.results:
                self.context.rerun_choices.add(self.number)
            self.context.results[self.number] = results

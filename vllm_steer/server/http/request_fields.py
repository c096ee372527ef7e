# SPDX-License-Identifier: Apache-2.0
"""From the fields of vLLM's OpenAI request objects to sampling parameters.

vLLM's request classes keep what they do not know in ``model_extra`` and go on without it. What is refused
here raises :class:`RequestRefused`, which vLLM answers with HTTP 400 and an OpenAI error object; so it does
where the answer would be a stream, since sampling parameters are made before a response starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from vllm_steer.capture.consumers.memory import STREAM, MemoryConsumer
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext
from vllm_steer.limits import REQUEST_EDITS
from vllm_steer.params import (
    APPLIED_KEY,
    CAPTURE_FIELD,
    EXTRA_ARGS_KEYS,
    EXTRA_KEY,
    FIELDS,
    compile_fields,
    program_of,
    read_specs,
)
from vllm_steer.program import Program
from vllm_steer.registry.composer import count_edits
from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.server.access_errors import AccessError
from vllm_steer.server.auth.current_key import current_key, require_field_rights
from vllm_steer.server.http.confusables import resembles
from vllm_steer.server.http.request_context import PROMPT_KEY, RequestContext, ResultsLocation, current_request
from vllm_steer.server.quota.tracker import Reservation
from vllm_steer.spec import CaptureSpec, Edit

POSITIONS = "positions"
# All others the server runs itself, and asks the model again with what they give.
_TOOLS_OF_CLIENTS = frozenset({"function", "custom"})
MEMORY = MemoryConsumer.name
_EXTRA_ARGS_KEYS = (*EXTRA_ARGS_KEYS, PROMPT_KEY)

Part: TypeAlias = tuple[str, tuple[Edit, ...], tuple[CaptureSpec, ...]]
"""A path in a body, and the edits and captures that stand there."""


class RequestRefused(VLLMValidationError, SteeringError):  # type: ignore[misc]
    """A :class:`SteeringError` that vLLM knows for a bad request: HTTP 400, with the field as ``param``."""

    def __init__(self, field: str, problem: str) -> None:
        # Not vLLM's, which would make one argument of it: both have to survive pickling.
        SteeringError.__init__(self, field, problem)
        self.parameter = field
        self.value = None

    __str__ = SteeringError.__str__  # vLLM's would name the parameter a second time


def refused(error: SteeringError) -> RequestRefused:
    """The form in which vLLM takes ``error``; the middleware answers it in ours, with its own status."""
    answered = RequestRefused(error.field, error.problem)
    context = current_request.get()
    if context is not None:
        # Of these, the status says whose fault it is, and whether to come again.
        keeps = isinstance(error, (AccessError, RegistryUnavailableError))
        context.refusal = error if keeps else answered
    return answered


def read_fields(request: Any) -> dict[str, Any]:
    """Our fields of one of vLLM's request objects, as its body had them; null counts as absent."""
    extra = request.model_extra or {}
    return {name: extra[name] for name in FIELDS if extra.get(name) is not None}


def apply_to_params(request: Any, params: Any) -> Any:
    """``params``, which vLLM made from ``request``, with its steering and captures; raises :class:`RequestRefused`."""
    try:
        _refuse_lookalikes(request)
        _refuse_background(request)
        fields = read_fields(request)
        if CAPTURE_FIELD in fields:
            _refuse_without_answer(request)
        answer: ResultsLocation = "response" if isinstance(request, ResponsesRequest) else "choices"
        _apply(fields, params, current_request.get() or RequestContext(), answer)
    except SteeringError as error:
        raise refused(error) from error
    return params


async def as_bad_request(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """Run ``AsyncLLM.add_request`` and raise :class:`RequestRefused` instead of a :class:`SteeringError`.

    vLLM answers any other error with HTTP 500 and no reason.
    """
    try:
        return await original(*args, **kwargs)
    except SteeringError as error:
        raise refused(error) from error


def refuse_beam_search(request: Any, _max_tokens: int | None = None) -> None:
    """Raise :class:`RequestRefused` where ``request`` has our fields: vLLM drops them on the way to the beams."""
    refuse_fields(request, "beam search does not carry it to the beams; use sampling")


def refuse_fields(request: Any, reason: str) -> None:
    """Raise :class:`RequestRefused` where ``request`` has our fields, or what can only be meant as one."""
    try:
        _refuse_lookalikes(request)
        for name in read_fields(request):
            raise SteeringError(name, reason)
    except SteeringError as error:
        raise refused(error) from error


def _refuse_lookalikes(request: Any) -> None:
    """Refuse what can only be meant as steering or capture and would be ignored."""
    for name, value in (request.model_extra or {}).items():
        if name not in FIELDS and (resembles(name, "steering") or _looks_like_capture(name, value)):
            raise SteeringError(name[:80], f"is not a field; the fields are {', '.join(FIELDS)}")
    for name in getattr(request, "vllm_xargs", None) or {}:
        if resembles(name, "steering") or name in _EXTRA_ARGS_KEYS:
            raise SteeringError(
                f"vllm_xargs.{name[:80]}", f"is not for clients; {', '.join(FIELDS)} go at the body's top"
            )


def _looks_like_capture(name: str, value: object) -> bool:
    if not isinstance(value, Mapping) or not resembles(name, CAPTURE_FIELD):
        return False
    return any("hooks" in spec for spec in (value, *value.values()) if isinstance(spec, Mapping))


def _refuse_background(request: Any) -> None:
    """Under a key, refuse what goes on when it has been answered: it would count for nobody."""
    if isinstance(request, ResponsesRequest) and request.background and current_key() is not None:
        raise SteeringError("background", "is not served with API keys: nothing would count it; leave it out")


def _refuse_without_answer(request: Any) -> None:
    """Refuse captures of which the answer would say nothing, neither rows nor what went wrong."""
    if isinstance(request, ResponsesRequest):
        if request.background:
            raise SteeringError(CAPTURE_FIELD, "the answer is sent before the model has run; leave background out")
        served_tools = sorted({tool.type for tool in request.tools} - _TOOLS_OF_CLIENTS)
        if served_tools:
            problem = f"with tools of the server ({', '.join(served_tools)}) the model runs several times"
            raise SteeringError(CAPTURE_FIELD, f"{problem}, and which run is meant is not defined; leave them out")
    memory = (request.model_extra or {}).get(CAPTURE_FIELD, {})
    memory = memory.get(MEMORY) if isinstance(memory, Mapping) else None
    if isinstance(memory, Mapping) and memory.get(STREAM):
        raise SteeringError(f"{CAPTURE_FIELD}.{MEMORY}.{STREAM}", "is for Python; here rows come in one last event")
    if current_request.get() is None:
        raise SteeringError(CAPTURE_FIELD, "nothing here carries what is captured; use vllm_steer.LLM, or a server")


def _apply(fields: Mapping[str, Any], params: Any, context: RequestContext, answer: ResultsLocation) -> None:
    compiled = context.compiled
    if compiled is None:
        require_field_rights(fields)
        own = compile_fields(fields)
        # All prompts of a body are admitted together: a change of global steering between them parts none.
        compiled = context.compiled = (
            own if context.engine is None else _admitted(own, context.engine, context.reservation)
        )
    if not compiled:
        return
    # Now, since the responses route begins its stream ahead of the engine.
    context.applied_json = compiled.get(APPLIED_KEY) or None
    params.extra_args = {**(params.extra_args or {}), **compiled}
    # Not from the middleware (the batch runner): the check is made when the engine is given the request.
    if context.engine is not None:
        context.engine.check(params, context.prompt_len)
    if CAPTURE_FIELD in fields:
        program = program_of(params)
        if context.engine is not None and context.reservation is not None and program is not None:
            most = context.engine.capabilities.most_row_bytes(program, context.prompt_len, params.max_tokens)
            context.reservation.reserve_rows(most * params.n)
        params.extra_args[PROMPT_KEY] = context.prompts
        context.prompts += 1
        context.samples = params.n
        context.consumers = tuple(fields[CAPTURE_FIELD])
        context.results_in = answer
    context.fields_applied = bool(fields)


def _admitted(own: Mapping[str, bytes], served: EngineContext, hold: Reservation | None) -> Mapping[str, bytes]:
    """With the mark also where nothing applies: the engine's front end is not to look again."""
    snapshot = served.registry.snapshot()
    if hold is not None:
        # Ahead of joining them: a few names can stand for more edits than a server joins in a moment.
        hold.tracker.check_count(REQUEST_EDITS, count_edits(own, snapshot))
    admitted = {APPLIED_KEY: b"", **served.registry.compose(own, snapshot)}
    if own and hold is not None and EXTRA_KEY in admitted:
        program = Program.from_bytes(admitted[EXTRA_KEY])
        specs = [spec for _, spec in read_specs(admitted)]
        hold.reserve_program(program, snapshot.steering_program, served.capabilities.num_layers, specs)
    return admitted

# SPDX-License-Identifier: Apache-2.0
"""Steering and capture fields of vLLM's OpenAI request objects, applied to sampling parameters.

vLLM's request classes keep unknown fields in ``model_extra`` and ignore them. Invalid requests raise
:class:`RequestRefused`, which vLLM answers with HTTP 400 and an OpenAI error object. Sampling parameters are made
before a response starts, so this also holds for streamed responses.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from vllm_steer.capture.consumers.memory import STREAM, MemoryConsumer
from vllm_steer.compat.internals import ResponsesRequest, SamplingParams, VLLMValidationError
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext
from vllm_steer.frontend.messages import messages_of
from vllm_steer.frontend.part_markers import bind_request
from vllm_steer.frontend.requests import check_beam_search, check_parameters
from vllm_steer.limits import REQUEST_EDITS, REQUEST_VECTORS
from vllm_steer.params import (
    APPLIED_KEY,
    CAPTURE_FIELD,
    FIELDS,
    MODULES_KEY,
    PROGRAM_KEY,
    PROMPT_KEY,
    compile_fields,
    program_of,
    read_specs,
)
from vllm_steer.program import Program
from vllm_steer.registry.composer import count_edits as count_composed
from vllm_steer.registry.errors import RegistryUnavailableError, UnknownModuleError
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.request.counts import count_directions, count_edits
from vllm_steer.request.edit_fields import GENERAL_FIELD
from vllm_steer.request.readout import READOUTS_FIELD
from vllm_steer.server.access_errors import AccessError
from vllm_steer.server.auth.current_key import current_key, require_field_rights
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.compiled_fields import compile_json_fields
from vllm_steer.server.http.misspelt_fields import refuse_misspelt
from vllm_steer.server.http.request_context import RequestContext, ResultsLocation, current_request
from vllm_steer.server.http.row_sources import STORE, take_store_option, with_rows
from vllm_steer.server.quota.tracker import Reservation

# The server runs all other tools itself and calls the model again with their results.
_CLIENT_TOOLS = frozenset({"function", "custom"})
MEMORY = MemoryConsumer.name
_IGNORED_KEYS = ("metadata", "chat_template_kwargs")
"""Objects that vLLM's request classes have and whose unknown keys have no effect."""
_COMPOSED_KEYS = frozenset({APPLIED_KEY, MODULES_KEY, PROGRAM_KEY})
"""Keys of parameters that were composed, or that are composed on their own."""


class RequestRefused(VLLMValidationError, SteeringError):  # type: ignore[misc]
    """A :class:`SteeringError` that vLLM reports as a bad request: HTTP 400 with the field as ``param``."""

    def __init__(self, field: str, problem: str) -> None:
        # vLLM's constructor would join both to one argument; the error must survive pickling.
        SteeringError.__init__(self, field, problem)
        self.parameter = field
        self.value = None

    __str__ = SteeringError.__str__  # vLLM's repeats the parameter


def refused(error: SteeringError) -> RequestRefused:
    """Return ``error`` as an error that vLLM reports as a bad request.

    The middleware replaces vLLM's response by one for the original error if that has another status.
    """
    problem = error.public_problem if isinstance(error, RegistryUnavailableError) else error.problem
    answered = RequestRefused(error.field, problem)
    context = current_request.get()
    if context is not None:
        # These errors have statuses of their own (401, 403, 413, 429, 503).
        has_status = isinstance(error, (AccessError, RegistryUnavailableError))
        context.refusal = error if has_status else answered
    return answered


def read_fields(request: Any) -> dict[str, Any]:
    """Return the steering and capture fields of a vLLM request object; null counts as absent."""
    extra = request.model_extra
    return {name: extra[name] for name in FIELDS if extra.get(name) is not None} if extra else {}


def apply_to_params(request: Any, params: Any) -> Any:
    """Add the steering and captures of ``request`` to the ``params`` that vLLM made from it.

    Raises:
        RequestRefused: A field is invalid or cannot be served.
    """
    try:
        _refuse_misspelled(request)
        _refuse_background(request)
        fields = read_fields(request)
        _refuse_lost_live(request, fields)
        for name in (CAPTURE_FIELD, READOUTS_FIELD):
            if name in fields:
                _refuse_without_answer(request, name)
        answer: ResultsLocation = "response" if isinstance(request, ResponsesRequest) else "choices"
        context = current_request.get() or RequestContext()
        _apply(fields, params, context, answer)
        if context.engine is not None and context.input_processor is not None:
            check_parameters(context.input_processor.vllm_config, params)
    except SteeringError as error:
        raise refused(error) from error
    return params


async def add_request(
    original: Callable[..., Awaitable[Any]],
    engine: Any,
    request_id: Any,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``AsyncLLM.add_request`` and raise :class:`RequestRefused` instead of a :class:`SteeringError`.

    vLLM answers any other error with HTTP 500 and no reason. The steps of a beam search, whose parameters vLLM makes,
    get the global steering that was checked at its start. So do the clips of a recording: in a stream, vLLM adds each
    of them when the one before has ended.
    """
    context = current_request.get()
    try:
        if context is not None and isinstance(params, SamplingParams):
            params = await _with_shared_steering(params, context)
        return await original(engine, request_id, prompt, params, *args, **kwargs)
    except SteeringError as error:
        raise refused(error) from error


async def _with_shared_steering(params: Any, context: RequestContext) -> Any:
    """Return ``params`` with the global steering of the HTTP request, if they were made without steering fields."""
    extra = params.extra_args or {}
    if context.beam_search:
        shared = context.compiled
    elif context.engine is None or context.closed or not extra.keys().isdisjoint(_COMPOSED_KEYS):
        return params
    else:
        if context.shared is None:
            snapshot = context.snapshot or await context.engine.registry.refresh()
            # Another prompt of the request may have set it meanwhile.
            context.shared = context.shared or _compose_in(snapshot, {}, context.engine, None)
        shared = context.shared
    if shared is None:
        return params
    params = copy.copy(params)
    params.extra_args = {**extra, **shared}
    return params


def begin_beam_search(request: Any, _max_tokens: int | None = None) -> None:
    """Check a beam search and compose the global steering of its steps.

    Raises:
        RequestRefused: ``request`` has steering fields, which vLLM would not apply to the beams; or there is global
            steering or a server-wide capture that would treat generated tokens as prompt.
    """
    refuse_fields(request, "is not supported with beam search; use sampling")
    context = current_request.get()
    if context is None or context.engine is None or context.compiled is not None:
        return
    try:
        snapshot = context.snapshot or context.engine.registry.snapshot()
        check_beam_search(context.engine, snapshot, "use_beam_search")
        context.compiled = _compose_in(snapshot, {}, context.engine, context.reservation)
    except SteeringError as error:
        raise refused(error) from error
    context.beam_search = True


def refuse_fields(request: Any, reason: str) -> None:
    """Raise :class:`RequestRefused` if ``request`` has steering fields or misspelled ones."""
    try:
        _refuse_misspelled(request)
        for name in read_fields(request):
            raise SteeringError(name, reason)
    except SteeringError as error:
        raise refused(error) from error


def _refuse_misspelled(request: Any) -> None:
    """Raise SteeringError for names that would be ignored: misspelt ones, and fields of other projects."""
    unknown = request.model_extra or {}
    given = {**unknown, **vars(request)}  # pydantic's getattr of a field that a class lacks takes long
    xargs = given.get("vllm_xargs") or {}
    known = {name: value for name in _IGNORED_KEYS if (value := given.get(name))}
    if not unknown and not xargs and not known:
        return
    context = current_request.get()
    refuse_misspelt(unknown, xargs, enabled=context is not None and context.engine is not None, known=known)


def _refuse_background(request: Any) -> None:
    """Raise SteeringError for background requests with an API key: quotas cannot count them after the response."""
    if isinstance(request, ResponsesRequest) and request.background and current_key() is not None:
        raise SteeringError("background", "is not supported with API keys, because quotas cannot count it; omit it")


def _refuse_without_answer(request: Any, field: str) -> None:
    """Raise SteeringError for captures or readouts whose results no response could carry."""
    if isinstance(request, ResponsesRequest):
        if request.background:
            raise SteeringError(
                field,
                "is not supported in background requests, which are answered before the model runs; omit background",
            )
        _refuse_served_tools(request, field)
    memory = (request.model_extra or {}).get(CAPTURE_FIELD, {})
    memory = memory.get(MEMORY) if isinstance(memory, Mapping) else None
    if isinstance(memory, Mapping) and memory.get(STREAM):
        raise SteeringError(
            f"{CAPTURE_FIELD}.{MEMORY}.{STREAM}",
            "is supported in Python only; in HTTP responses, all rows are in the last event",
        )
    if current_request.get() is None:
        raise SteeringError(
            field, "is not supported here, because no response carries the results; use vllm_steer.LLM or a server"
        )


def _refuse_lost_live(request: Any, fields: Mapping[str, Any]) -> None:
    """Raise SteeringError for live strengths that nothing can change, or that are 1 again in each run of the model."""
    if isinstance(request, ResponsesRequest) and isinstance(edits := fields.get(GENERAL_FIELD), list):
        for i, edit in enumerate(edits):
            if isinstance(edit, Mapping) and edit.get("live") is not None:
                if request.background:
                    problem = "cannot change after a background request is answered; omit background"
                    raise SteeringError(f"{GENERAL_FIELD}[{i}].live", problem)
                _refuse_served_tools(request, f"{GENERAL_FIELD}[{i}].live")


def _refuse_served_tools(request: Any, field: str) -> None:
    served_tools = sorted({tool.type for tool in request.tools} - _CLIENT_TOOLS)
    if served_tools:
        raise SteeringError(
            field,
            f"is not supported with server-side tools ({', '.join(served_tools)}), which run the model several times; "
            "omit them",
        )


def _apply(fields: Mapping[str, Any], params: Any, context: RequestContext, answer: ResultsLocation) -> None:
    compiled = context.compiled
    if compiled is None:
        own: Mapping[str, bytes] = {}
        if fields:
            fields, own = context.own or compile_own(fields, context)
        # All prompts of a body are composed together, so that they get the same global steering.
        compiled = context.compiled = own if context.engine is None else _compose(own, context.engine, context)
    if not compiled:
        return
    # Set before the engine sees the request, because the responses route starts its stream earlier.
    context.applied_json = compiled.get(APPLIED_KEY) or None
    params.extra_args = {**(params.extra_args or {}), **compiled}
    if PROGRAM_KEY in compiled:
        params.extra_args[PROMPT_KEY] = context.prompts
    # The batch runner has no middleware and no engine yet; the check happens when the request is submitted.
    if context.engine is not None:
        _bind_parts(params, context, context.engine)
        context.engine.check(params, context.prompt_len)
    program, reservation = program_of(params), context.reservation
    if CAPTURE_FIELD in fields:
        if context.engine and reservation and reservation.counts_rows and program is not None:
            most = context.engine.capabilities.most_row_bytes(program, context.prompt_len, params.max_tokens)
            reservation.reserve_rows(most * params.n)
        context.consumers = tuple(fields[CAPTURE_FIELD])
    if program is not None:
        context.dynamic = program.has_records
        if context.dynamic:
            _reserve_records(program, params, context)
        context.prompts += 1
        context.samples = params.n
        context.results_in = answer
    context.fields_applied = bool(fields)


def _bind_parts(params: Any, context: RequestContext, engine: EngineContext) -> None:
    """Bind the parts of the program to the prompt. The engine would do so after the start of a streamed response."""
    prompt = context.prompt
    if prompt is None or context.input_processor is None or engine.markers is None:
        return
    tokens = prompt.get("decoder_prompt", prompt)
    places = tokens.get("mm_placeholders") or {}
    request = SimpleNamespace(
        sampling_params=params,
        prompt_token_ids=tokens.get("prompt_token_ids"),
        prompt_is_token_ids=tokens.get("is_token_ids"),
        mm_features=[SimpleNamespace(modality=name, mm_position=each) for name in places for each in places[name]],
    )
    with messages_of(prompt):
        bind_request(request, context.input_processor, engine.markers)
    params.extra_args = request.sampling_params.extra_args


def compile_own(fields: Mapping[str, Any], context: RequestContext) -> tuple[Mapping[str, Any], Mapping[str, bytes]]:
    """Return the fields without the option ``store``, and the ``extra_args`` compiled from them.

    Raises:
        SteeringError: A field is invalid, too long, or refers to rows that are not there.
        AccessError: The key lacks a right, or the request exceeds a limit.
    """
    require_field_rights(fields)
    if context.reservation is not None:  # before anything in them is read
        context.reservation.tracker.check_count(REQUEST_EDITS, count_edits(fields))
        context.reservation.tracker.check_count(REQUEST_VECTORS, count_directions(fields))
    fields, context.store_rows = take_store_option(fields, MEMORY)
    if context.store_rows and context.capture_store is None:
        raise SteeringError(
            f"{CAPTURE_FIELD}.{MEMORY}.{STORE}",
            "is not supported in a batch run, which stores no captures; omit it, or capture to files",
        )
    try:
        resolved = with_rows(fields, context)
        if context.reservation is not None and resolved is not fields:  # an expression has an edit for each layer
            context.reservation.tracker.check_count(REQUEST_EDITS, count_edits(resolved))
        # The cache identifies fields by their JSON, which does not contain rows that are named.
        return fields, compile_json_fields(fields) if resolved is fields else compile_fields(resolved)
    except SteeringError as error:
        if context.engine is None:
            raise
        if isinstance(error, UnknownModuleError):
            raise _with_names(error, context.snapshot or context.engine.registry.snapshot()) from None
        raise context.engine.capabilities.with_layers(error) from None


def _reserve_records(program: Program, params: Any, context: RequestContext) -> None:
    """Reserve memory for the readouts of one prompt."""
    if context.engine is not None and context.reservation is not None:
        longest = context.engine.capabilities.max_model_len
        given = (context.prompt_len, params.max_tokens)
        tokens = longest if None in given else min(sum(given), longest)
        context.reservation.reserve_rows(4 * program.layout.width * tokens * params.n)


def _compose(own: Mapping[str, bytes], engine: EngineContext, context: RequestContext) -> Mapping[str, bytes]:
    """Return the request's ``extra_args`` with modules and global steering, and reserve what they take.

    The result always has `APPLIED_KEY`, so that the engine's front end does not compose them again.
    """
    snapshot = context.snapshot or engine.registry.snapshot()
    try:
        return _compose_in(snapshot, own, engine, context.reservation)
    except UnknownModuleError as error:
        raise _with_names(error, snapshot) from None


def _with_names(error: UnknownModuleError, snapshot: Snapshot) -> UnknownModuleError:
    """Return the error with the names of modules if the key may list them."""
    key = current_key()
    return error.with_names(snapshot.index.modules) if key is None or Right.READ in key.rights else error


def _compose_in(
    snapshot: Snapshot, own: Mapping[str, bytes], engine: EngineContext, reservation: Reservation | None
) -> Mapping[str, bytes]:
    if reservation is not None and own:
        # Checked before joining: a few modules can contain so many edits that joining them takes long.
        reservation.tracker.check_count(REQUEST_EDITS, count_composed(own, snapshot))
    composed = {APPLIED_KEY: b"", **engine.registry.compose(own, snapshot)}
    if own and reservation is not None and PROGRAM_KEY in composed:
        program = Program.from_bytes(composed[PROGRAM_KEY])
        specs = [spec for _, spec in read_specs(composed)]
        num_layers, shared = engine.capabilities.num_layers, snapshot.steering_program
        reservation.reserve_program(program, shared, num_layers, specs, snapshot.streams_at)
    return composed

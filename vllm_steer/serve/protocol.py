# SPDX-License-Identifier: Apache-2.0
"""From the fields of vLLM's OpenAI request objects to sampling parameters.

vLLM's request classes keep what they do not know in ``model_extra`` and go on without it. What is refused
here raises :class:`RequestRefused`, which vLLM answers with HTTP 400 and an OpenAI error object; so it does
where the answer would be a stream, since sampling parameters are made before a response starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from vllm_steer.errors import SteeringError
from vllm_steer.frontend import Served
from vllm_steer.params import CAPTURE_FIELD, CAPTURE_KEY, EXTRA_KEY, FIELDS, compile_fields
from vllm_steer.program import compile_program
from vllm_steer.serve.exchange import PROMPT_KEY, Exchange, current
from vllm_steer.spec import FIELD_NAMES, CaptureSpec, Edit, parse_capture, parse_fields
from vllm_steer.spec.fields import GENERAL_FIELD

POSITIONS = "positions"
_OWN_KEYS = (EXTRA_KEY, CAPTURE_KEY, PROMPT_KEY)

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


def read_fields(request: Any) -> dict[str, Any]:
    """Our fields of one of vLLM's request objects, as its body had them; null counts as absent."""
    extra = request.model_extra or {}
    return {name: extra[name] for name in FIELDS if extra.get(name) is not None}


def apply_to_params(request: Any, params: Any) -> Any:
    """``params``, which vLLM made from ``request``, with its steering and captures; raises :class:`RequestRefused`."""
    try:
        _refuse_lookalikes(request)
        fields = read_fields(request)
        if CAPTURE_FIELD in fields:
            _refuse_without_answer(request)
        if fields:
            _apply(fields, params, current.get() or Exchange())
    except SteeringError as error:
        raise RequestRefused(error.field, error.problem) from error
    return params


def refuse_beam_search(request: Any) -> None:
    """Raise :class:`RequestRefused` where ``request`` has our fields: vLLM drops them on the way to the beams."""
    for name in read_fields(request):
        raise RequestRefused(name, "beam search does not carry it to the beams; use sampling")


def _refuse_lookalikes(request: Any) -> None:
    """Refuse what can only be meant as steering or capture and would be ignored."""
    for name, value in (request.model_extra or {}).items():
        if name not in FIELDS and ("steering" in name or _looks_like_capture(name, value)):
            raise SteeringError(name[:80], f"is not a field; the fields are {', '.join(FIELDS)}")
    for name in getattr(request, "vllm_xargs", None) or {}:
        if "steering" in name or name in _OWN_KEYS:
            raise SteeringError(
                f"vllm_xargs.{name[:80]}", f"is not for clients; {', '.join(FIELDS)} go at the body's top"
            )


def _looks_like_capture(name: str, value: object) -> bool:
    if "capture" not in name.lower() or not isinstance(value, Mapping):
        return False
    return any("hooks" in spec for spec in (value, *value.values()) if isinstance(spec, Mapping))


def _refuse_without_answer(request: Any) -> None:
    """Refuse captures of which the answer would say nothing, neither rows nor what went wrong."""
    if isinstance(request, ResponsesRequest):
        problem = "answers of the responses API have no place for what is captured"
        raise SteeringError(CAPTURE_FIELD, f"{problem}; use /v1/completions or /v1/chat/completions")
    if current.get() is None:
        raise SteeringError(CAPTURE_FIELD, "only a server's answers carry what is captured; use vllm_steer.LLM here")


def _apply(fields: Mapping[str, Any], params: Any, exchange: Exchange) -> None:
    compiled = exchange.compiled
    if compiled is None:
        compiled = compile_fields(fields)
        if not compiled:
            return
        exchange.compiled = compiled
    params.extra_args = {**(params.extra_args or {}), **compiled}
    # Not from the middleware (the batch runner): the check is made when the engine is given the request.
    if exchange.served is not None:
        try:
            exchange.served.check(params, exchange.prompt_len)
        except SteeringError as error:
            raise _located(fields, exchange.served, exchange.prompt_len, error) from None
    if CAPTURE_FIELD in fields:
        params.extra_args[PROMPT_KEY] = exchange.prompts
        exchange.prompts += 1
        exchange.samples = params.n
        exchange.consumers = tuple(fields[CAPTURE_FIELD])
    exchange.applied = True


def _located(fields: Mapping[str, Any], served: Served, prompt_len: int | None, error: SteeringError) -> SteeringError:
    """What is wrong with the first part of ``fields`` that is refused by itself, under its path."""
    for path, edits, captures in (*_single_edits(fields), *_single_hooks(fields)):
        try:
            served.capabilities.check(compile_program(edits, captures), prompt_len)
        except SteeringError as alone:
            named = alone.field.partition(" ")[0]
            if captures and named == POSITIONS:
                path = f"{path.partition('.hooks.')[0]}.{POSITIONS}"
            part_of_edit = "" if captures or named == GENERAL_FIELD else f"{alone.field}: "
            return SteeringError(path, f"{part_of_edit}{alone.problem}")
    return error


def _single_edits(fields: Mapping[str, Any]) -> Iterator[Part]:
    """The edits of valid ``fields``, each by itself, with their paths."""
    for name in FIELD_NAMES:
        value = fields.get(name, ())
        if isinstance(value, Mapping):
            for point, layers in value.items():
                for layer, vector in layers.items():
                    yield f"{name}.{point}[{layer}]", parse_fields({name: {point: {layer: vector}}}), ()
        else:
            for i, edit in enumerate(value):
                yield f"{name}[{i}]", parse_fields({name: [edit]}), ()


def _single_hooks(fields: Mapping[str, Any]) -> Iterator[Part]:
    """The hooks of valid ``fields``, each by itself, with their paths."""
    for consumer, spec in parse_capture(fields.get(CAPTURE_FIELD)):
        for point, layers in spec.hooks:
            alone = CaptureSpec(hooks={point: layers}, positions=spec.tokens, before=spec.before)
            yield f"{CAPTURE_FIELD}.{consumer}.hooks.{point}", (), (alone,)

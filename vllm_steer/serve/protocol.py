# SPDX-License-Identifier: Apache-2.0
"""From the fields of vLLM's OpenAI request objects to sampling parameters.

vLLM's request classes keep what they do not know in ``model_extra`` and go on without it. What is refused
here raises :class:`RequestRefused`, which vLLM answers with HTTP 400 and an OpenAI error object; so it does
where the answer would be a stream, since sampling parameters are made before a response starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_steer.errors import SteeringError
from vllm_steer.params import CAPTURE_FIELD, EXTRA_KEY, FIELDS, compile_fields
from vllm_steer.program import compile_program
from vllm_steer.serve.exchange import Exchange, current
from vllm_steer.spec import parse_fields
from vllm_steer.spec.fields import GENERAL_FIELD


class RequestRefused(VLLMValidationError, SteeringError):  # type: ignore[misc]
    """A :class:`SteeringError` that vLLM knows for a bad request: HTTP 400, with the field as ``param``."""

    def __init__(self, field: str, problem: str) -> None:
        # Not vLLM's, which would make one argument of it: both have to survive pickling.
        SteeringError.__init__(self, field, problem)
        self.parameter = field
        self.value = None

    __str__ = SteeringError.__str__  # vLLM's would name the parameter a second time


def read_fields(request: Any) -> dict[str, Any]:
    """The steering fields of one of vLLM's request objects, as its body had them; null counts as absent."""
    extra = request.model_extra or {}
    return {name: extra[name] for name in FIELDS if extra.get(name) is not None}


def apply_to_params(request: Any, params: Any) -> Any:
    """``params``, which vLLM made from ``request``, with its steering; raises :class:`RequestRefused`."""
    try:
        _refuse_lookalikes(request)
        fields = read_fields(request)
        if fields:
            _apply(fields, params, current.get() or Exchange())
    except SteeringError as error:
        raise RequestRefused(error.field, error.problem) from error
    return params


def refuse_beam_search(request: Any) -> None:
    """Raise :class:`RequestRefused` where ``request`` has steering: vLLM drops it on the way to the beams."""
    for name in read_fields(request):
        raise RequestRefused(name, "beam search does not carry it to the beams; use sampling")


def _refuse_lookalikes(request: Any) -> None:
    """Refuse what can only be meant as steering and would be ignored."""
    for name in request.model_extra or {}:
        if "steering" in name and name not in FIELDS:
            raise SteeringError(name[:80], f"is not a field; the steering fields are {', '.join(FIELDS)}")
    for name in getattr(request, "vllm_xargs", None) or {}:
        if "steering" in name or name == EXTRA_KEY:
            raise SteeringError(f"vllm_xargs.{name[:80]}", f"cannot steer; {', '.join(FIELDS)} go at the body's top")


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
            raise _located(fields, exchange, error) from None
    exchange.applied = True


def _located(fields: Mapping[str, Any], exchange: Exchange, error: SteeringError) -> SteeringError:
    """What is wrong with the first edit of ``fields`` that is refused by itself, under its path."""
    if exchange.served is not None:
        for path, part in _single_edits(fields):
            try:
                exchange.served.capabilities.check(compile_program(parse_fields(part)), exchange.prompt_len)
            except SteeringError as alone:
                part_of_edit = "" if alone.field == GENERAL_FIELD else f"{alone.field}: "
                return SteeringError(path, f"{part_of_edit}{alone.problem}")
    return error


def _single_edits(fields: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The edits of valid ``fields``, each by itself, with their paths."""
    for name, value in fields.items():
        if name == CAPTURE_FIELD:
            continue
        if isinstance(value, Mapping):
            for point, layers in value.items():
                for layer, vector in layers.items():
                    yield f"{name}.{point}[{layer}]", {name: {point: {layer: vector}}}
        else:
            for i, edit in enumerate(value):
                yield f"{name}[{i}]", {name: [edit]}

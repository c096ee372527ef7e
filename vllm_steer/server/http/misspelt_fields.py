# SPDX-License-Identifier: Apache-2.0
"""Detection of names that would be ignored: misspelt fields, and fields of other projects."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import ensure_engine_context
from vllm_steer.limits import MAX_NAME_CHARS, MAX_NAMES
from vllm_steer.params import CAPTURE_FIELD, FIELDS, RESERVED_KEYS
from vllm_steer.request.request_form import GENERAL_NAMES
from vllm_steer.request.unknown_fields import problem_of
from vllm_steer.server.http.confusables import resembles

_DOSES = ("dose", "doses")
_STEERING = "steering"
WRAPPERS = (
    "extra_args", "extra_body", "generation_config", "model_kwargs", "nvext", "options", "parameters",
    "sampling_params", "vllm_xargs",
)  # fmt: skip
"""Objects of a body in which clients put fields, because other servers or client libraries read them there."""
_MAX_DEPTH = 3
"""Wrappers within wrappers, such as ``extra_body.sampling_params.extra_args``."""
_NO_OBJECTS: Mapping[str, Any] = MappingProxyType({})
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


def find_misspelt(body: bytes, parents: Iterable[str] = ()) -> SteeringError | None:
    """Return the error for the first misspelt name at the top level of a JSON body, or None.

    For routes whose request classes do not keep unknown fields. Hot path: values are skipped, not decoded, which takes
    less time than the search for the fields' names.

    Args:
        body: The body.
        parents: Names of objects at the top level whose names are compared as well.
    """
    encoding = json.detect_encoding(body[:4])
    try:
        document = _top_level.decode(body if encoding == "utf-8" else body.decode(encoding).encode())
    except (msgspec.MsgspecError, ValueError, RecursionError):  # vLLM refuses it
        return None
    error = too_many_names(document, "body")
    error = error or _first_misspelt(name for name in document if bytes(document[name]) != b"null")
    for parent in parents:
        if error is None and (inner := bytes(document.get(parent, b""))):
            inside = find_misspelt(inner) or _first_field(inner)
            error = None if inside is None else SteeringError(f"{parent}.{inside.field}", inside.problem)
    return error


def _first_field(body: bytes) -> SteeringError | None:
    """Return the error for the first field in a JSON object of a body, or None."""
    document = _top_level.decode(body) if body.startswith(b"{") else {}
    found = (name for name in FIELDS if bytes(document.get(name, b"")).startswith((b"{", b"[")))
    return next((SteeringError(name, "would be ignored here") for name in found), None)


class FormNames:
    """Search for misspelt names in a multipart form."""

    def __init__(self) -> None:
        self._compared: set[str] = set()

    def find_misspelt(self, names: Iterable[str]) -> SteeringError | None:
        """Return the error for the first misspelt one of the next names, or None."""
        new = [name for name in names if name not in self._compared]
        self._compared.update(new)
        return too_many_names(self._compared, "body") or _first_misspelt(new)


def too_many_names(names: Collection[str], field: str) -> SteeringError | None:
    """Return the error for an object with more names than can be compared with our fields, or None.

    Comparing takes some tens of microseconds per name, and time for each character.
    """
    if len(names) > MAX_NAMES:
        return SteeringError(field, f"has {len(names)} names that are not fields; at most {MAX_NAMES} are allowed")
    if sum(map(len, names)) > MAX_NAME_CHARS:
        return SteeringError(field, f"has names of more than {MAX_NAME_CHARS} characters in all; shorten them")
    return None


def _first_misspelt(names: Iterable[str]) -> SteeringError | None:
    for name in names:
        if name in FIELDS:
            continue
        problem = problem_of(name)
        if problem is None and resembles(name, _STEERING):
            problem = "unknown field, which would be ignored"
        if problem is not None:
            return SteeringError(name[:80], problem)
    return None


async def is_refused(misspelt: SteeringError, app: Any) -> bool:
    """Return whether the server of ``app`` refuses a misspelt name: it steers, or the name contains "steering"."""
    engine = getattr(app.state, "engine_client", None)
    enabled = engine is not None and await ensure_engine_context(engine) is not None
    return enabled or resembles(misspelt.field, _STEERING)


def refuse_misspelt(
    unknown: Mapping[str, Any], xargs: Mapping[str, Any], *, enabled: bool, known: Mapping[str, Any] = _NO_OBJECTS
) -> None:
    """Raise SteeringError for the first name in a vLLM request object that would be ignored.

    Args:
        unknown: The request's unknown fields.
        xargs: Its ``vllm_xargs``.
        enabled: Whether the engine steers.
        known: Objects of the request that vLLM knows and whose keys it ignores, by name.
    """
    for names, field in ((unknown, "body"), (xargs, "vllm_xargs")):
        if (error := too_many_names(names, field)) is not None:
            raise error
    if enabled:
        _refuse_known_mistakes(unknown, "")
        _refuse_known_mistakes({name: xargs[name] for name in xargs if name not in RESERVED_KEYS}, "vllm_xargs.")
        _refuse_wrapped(unknown, "")
        _refuse_wrapped(known, "")
    for name, value in unknown.items():
        if name not in FIELDS and (resembles(name, _STEERING) or _looks_like_field(name, value)):
            raise SteeringError(name[:80], f"unknown field; use one of {', '.join(FIELDS)}")
        if name in _DOSES and isinstance(value, (int, float)):
            problem = 'belongs to a module or an edit, such as {"module": "calm", "dose": 0.3} in steering_modules'
            raise SteeringError(name, problem)
    for name in xargs:
        if resembles(name, _STEERING) or name in RESERVED_KEYS:
            raise SteeringError(
                f"vllm_xargs.{name[:80]}", f"is reserved; put {', '.join(FIELDS)} at the top level of the body"
            )


def _refuse_known_mistakes(given: Mapping[str, Any], path: str) -> None:
    if (error := too_many_names(given, path.strip(".") or "body")) is not None:
        raise error
    for name, value in given.items():
        if value is not None and name not in FIELDS and (problem := problem_of(name)) is not None:
            raise SteeringError(f"{path}{name}", problem)


def _refuse_wrapped(objects: Mapping[str, Any], path: str, depth: int = 1) -> None:
    """Raise SteeringError for a field within one of some objects that vLLM ignores."""
    for parent, inner in objects.items():
        if not isinstance(inner, Mapping) or parent in FIELDS:
            continue
        where = f"{path}{parent[:80]}."
        # Looks up each name of a fixed table, so the number of the object's keys does not matter.
        for name in FIELDS:
            if _is_wrapped(name, inner.get(name)):
                raise SteeringError(
                    f"{where}{name}", f"would be ignored here; move {name} to the top level of the body"
                )
        if parent in WRAPPERS:
            _refuse_known_mistakes(inner, where)
            if depth < _MAX_DEPTH:
                _refuse_wrapped({name: inner[name] for name in WRAPPERS if name in inner}, where, depth + 1)


def _is_wrapped(name: str, value: Any) -> bool:
    """Return whether the value of a name in another object is a field's; plain texts are labels, as in ``metadata``."""
    if isinstance(value, str):
        return value.lstrip()[:1] in ("{", "[")
    return value is not None and isinstance(value, GENERAL_NAMES.get(name, object))


def _looks_like_field(name: str, value: object) -> bool:
    """Return whether a field with a general name is one of ours, misspelt, as its value shows."""
    if isinstance(value, list):
        return resembles(name, "stop") and any(isinstance(each, Mapping) and "readout" in each for each in value)
    if not isinstance(value, Mapping):
        return False
    specs = [spec for spec in (value, *value.values()) if isinstance(spec, Mapping)]
    if resembles(name, "readout"):
        return any("probe" in spec or "projections" in spec for spec in specs)
    return resembles(name, CAPTURE_FIELD) and any("hooks" in spec for spec in specs)

# SPDX-License-Identifier: Apache-2.0
"""Detection of names that would be ignored: misspelt fields, and fields of other projects."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import ensure_engine_context
from vllm_steer.limits import MAX_NAME_CHARS, MAX_NAMES
from vllm_steer.params import CAPTURE_FIELD, FIELDS, RESERVED_KEYS
from vllm_steer.server.http.confusables import resembles
from vllm_steer.spec.unknown_fields import problem_of

_STEERING = "steering"
_PARENTS = ("extra_args", "extra_body", "sampling_params")
"""Unknown objects of a body in which clients put fields, because other servers or client libraries read them there."""
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
        if error is None and parent in document:
            inner = find_misspelt(bytes(document[parent]))
            error = None if inner is None else SteeringError(f"{parent}.{inner.field}", inner.problem)
    return error


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

    Comparing takes up to 40 microseconds per name, and time for each character.
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


def refuse_misspelt(unknown: Mapping[str, Any], xargs: Mapping[str, Any], *, enabled: bool) -> None:
    """Raise SteeringError for the first misspelt name in a vLLM request object.

    Args:
        unknown: The request's unknown fields.
        xargs: Its ``vllm_xargs``.
        enabled: Whether the engine steers.
    """
    for names, field in ((unknown, "body"), (xargs, "vllm_xargs")):
        if (error := too_many_names(names, field)) is not None:
            raise error
    if enabled:
        _refuse_known_mistakes(unknown, "")
        _refuse_known_mistakes({name: xargs[name] for name in xargs if name not in RESERVED_KEYS}, "vllm_xargs.")
        for parent in _PARENTS:
            if isinstance(unknown.get(parent), Mapping):
                _refuse_known_mistakes(unknown[parent], f"{parent}.")
    for name, value in unknown.items():
        if name not in FIELDS and (resembles(name, _STEERING) or _looks_like_field(name, value)):
            raise SteeringError(name[:80], f"unknown field; use one of {', '.join(FIELDS)}")
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

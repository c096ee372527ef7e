# SPDX-License-Identifier: Apache-2.0
"""Detection of steering and capture fields in the raw bytes of a request body.

The scanner finds whether a body has such fields, and problems that parsed JSON no longer shows, such as duplicate keys.
``request/`` validates the fields themselves, after vLLM has parsed the body.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.params import CAPTURE_FIELD, FIELDS
from vllm_steer.request.readout import READOUTS_FIELD
from vllm_steer.request.request_form import GENERAL_NAMES
from vllm_steer.request.scalars import shown

OVERLAP = 256
"""Bytes at the end of a chunk of a body that must be scanned again together with the next chunk."""

# Objects that must not contain the fields, because vLLM drops unknown keys in them.
_WRONG_PARENTS = ("extra_args", "extra_body", "sampling_params", "sampling_params.extra_args", "vllm_xargs")
EVENT_PARENTS = ("session",)
"""The object of an event that configures a realtime session."""

# Fields of edits that may be lists of packed vectors.
_MATRICES = (".vector", ".subspace")

# Deeper than any valid field; the options of a capture's consumer are the deepest.
_MAX_DEPTH = 16

# Escapes of the letters and the underscore of a field name.
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
# Two patterns, to scan each line once: a single one would scan the rest of a line for each `form-data` in it.
_FORM_PART = re.compile(rb"form-data;([^\r\n]*[\r\n]?)", re.IGNORECASE)
_FORM_NAME = re.compile(rb'\bname="?([^"\r\n;=]{1,128})"?[;\r\n]', re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    """Steering and capture fields of a JSON body."""

    fields: tuple[str, ...] = ()
    """Names of the fields that are present and not null."""
    problem: SteeringError | None = None
    """A problem of the body that its parsed form no longer shows."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Their values, by name."""
    document: dict[str, Any] | None = None
    """The whole body, if it has fields and no object in it has duplicate keys; otherwise it may be None."""


def may_hold_fields(data: bytes) -> bool:
    """Return whether a chunk of JSON text may contain a field name as a key; false positives are possible."""
    return (
        (b"steering" in data and (b'"steering' in data or b'steering_vectors"' in data))
        or b'"capture"' in data
        or b'"readouts"' in data
        or b'"stop_on"' in data
        or (b"\\" in data and b"\\u00" in data and _ESCAPED_LETTER.search(data) is not None)
    )


def is_utf8(body: bytes) -> bool:
    """Return whether a JSON body is in UTF-8; :func:`may_hold_fields` does not detect fields in other encodings."""
    return json.detect_encoding(body[:4]).startswith("utf-8")


def form_names(data: bytes) -> list[str]:
    """Return the names of the parts that begin in a chunk of a multipart form.

    OpenAI's clients write an object as one part for each value, such as ``steering_vectors[post_block][1][]``. The
    returned names have no keys.
    """
    if b"form-data;" not in data.lower():  # the pattern takes much longer for audio
        return []
    names = (name for part in _FORM_PART.finditer(data) for name in _FORM_NAME.findall(part[1]))
    return list(dict.fromkeys(name.decode("utf-8", "replace").partition("[")[0] for name in names))


def form_field(names: Iterable[str]) -> str | None:
    """Return the first of the parts' names that is a field, if any."""
    return next((name.lower() for name in names if name.lower() in FIELDS), None)


def event_field(event: bytes) -> str | None:
    """Return the field that a WebSocket event has at its top level or in its session, if any."""
    if not may_hold_fields(event):
        return None
    found = find_fields(event, EVENT_PARENTS)
    return found.fields[0] if found.fields else None


def find_fields(body: bytes, parents: tuple[str, ...] = _WRONG_PARENTS) -> Found:
    """Find the fields in a whole JSON body.

    Malformed JSON yields no fields; the next parser refuses it.

    Args:
        body: The body.
        parents: Paths of objects that must not contain fields.
    """
    document = _without_duplicates(body)
    unique = document is not None
    try:
        if not unique:
            document = json.loads(body, object_pairs_hook=_object)
    except json.JSONDecodeError:
        return Found()
    except (ValueError, RecursionError) as error:  # huge numbers, wrong encodings, deep nesting
        reason = str(error).partition(";")[0]  # the rest of the message is about Python
        return Found(problem=SteeringError("body", f"cannot be read as JSON: {reason}"))
    if not isinstance(document, dict):
        return Found()
    for parent in parents:
        inner: Any = document
        for key in parent.split("."):
            inner = inner.get(key) if isinstance(inner, dict) else None
        for name in FIELDS:
            if isinstance(inner, dict) and name in inner and isinstance(inner[name], GENERAL_NAMES.get(name, object)):
                problem = SteeringError(
                    f"{parent}.{name}", f"would be ignored here; move {name} to the top level of the body"
                )
                return Found((name,), problem)
    fields = tuple(name for name in FIELDS if document.get(name) is not None or name in _duplicates(document))
    values = {name: document[name] for name in fields}
    if unique:
        return Found(fields, values=values, document=document if fields else None)
    return Found(fields, _duplicate(document, fields), values)


def _without_duplicates(body: bytes) -> dict[str, Any] | None:
    """Return the object of a body that certainly has no duplicate keys, otherwise None.

    msgspec reads numbers ten times faster than Python's parser and refuses more, but it hides duplicate keys. Each key
    has a colon, so there are none if the body and its encoded object have equally many colons. A body with an escape
    that may be a colon returns None.
    """
    if b"\\u003" in body:
        return None
    try:
        document = msgspec.json.decode(body)
        if not isinstance(document, dict) or msgspec.json.encode(document).count(b":") != body.count(b":"):
            return None
    except (msgspec.MsgspecError, OverflowError, RecursionError, UnicodeError):
        return None
    return document


class _ObjectWithDuplicates(dict[str, Any]):
    """A JSON object with duplicate keys."""

    duplicates: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Hot path: a body can have millions of objects.
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    counts = Counter(key for key, _ in pairs)
    repeating = _ObjectWithDuplicates(made)
    repeating.duplicates = tuple(key for key, count in counts.items() if count > 1)
    return repeating


def _duplicates(value: dict[str, Any]) -> tuple[str, ...]:
    return value.duplicates if isinstance(value, _ObjectWithDuplicates) else ()


def _duplicate(document: dict[str, Any], fields: tuple[str, ...]) -> SteeringError | None:
    for name in fields:
        if name in _duplicates(document):
            return SteeringError(name, "is in the body twice, and one would be ignored; give it once")
        found = _duplicate_inside(document[name], name in (CAPTURE_FIELD, READOUTS_FIELD), _MAX_DEPTH)
        if found is not None:
            return SteeringError(f"{name}{found[0]}", f"has {found[1]} twice, and one would be ignored; give it once")
    return None


def _path_part(key: str) -> str:
    """Return a key as a part of a path; lone surrogates and control characters are escaped."""
    short = shown(key).strip("'")
    return f"[{short}]" if short.isdecimal() else f".{short}"


def _duplicate_inside(value: Any, in_lists: bool, depth: int) -> tuple[str, str] | None:
    """Return the path below ``value`` of an object with duplicate keys, and the key.

    Lists are searched at the top level (``steering`` is one), in ``when``, in matrices, whose rows may be packed, and
    otherwise only if ``in_lists``, because most lists contain many numbers.
    """
    if isinstance(value, dict):
        if twice := _duplicates(value):
            return "", shown(twice[0])
        inner = [(_path_part(key), item) for key, item in value.items() if isinstance(item, (dict, list))]
    elif isinstance(value, list) and (in_lists or depth == _MAX_DEPTH):
        inner = [(f"[{i}]", item) for i, item in enumerate(value) if isinstance(item, (dict, list))]
    else:
        return None
    if depth > 0:
        for step, item in inner:
            has_rows = step in _MATRICES and isinstance(item, list) and isinstance(next(iter(item), None), (dict, list))
            search = in_lists or step == ".when" or has_rows
            found = _duplicate_inside(item, search, depth - 1)
            if found is not None:
                return step + found[0], found[1]
    return None

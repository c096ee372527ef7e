# SPDX-License-Identifier: Apache-2.0
"""What the bytes of a request body say about steering and capture, before anything else reads them.

Nothing here checks the fields themselves: ``spec/`` does, on what vLLM has parsed. This finds out whether
fields are there at all, and what parsed JSON no longer shows: a key that stood twice in one object.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.params import CAPTURE_FIELD, FIELDS
from vllm_steer.spec.scalars import shown

OVERLAP = 256
"""How many bytes of a body's piece are to be looked at again with the next piece."""

# Objects beside which, not in which, the fields belong: vLLM drops what it does not know in them.
_WRONG_PLACES = ("extra_body", "sampling_params", "sampling_params.extra_args", "vllm_xargs")
_OF_EVENTS = ("session",)
"""As OpenAI's clients write an event that sets up a session."""

# Deeper than any field that is not refused when it is parsed: the options of a capture's consumer are the deepest.
_DEPTH = 16

# The letters and the underscore of a key may be written as escapes; other alphabets have other escapes.
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
# In two steps, each line once: a single pattern would look through the rest of a line for each `form-data` in it.
_FORM_PART = re.compile(rb"form-data;([^\r\n]*[\r\n]?)", re.IGNORECASE)
_FORM_NAME = re.compile(rb'\bname="?(' + "|".join(FIELDS).encode() + rb')"?[;\r\n]', re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    """Our fields in a JSON body."""

    fields: tuple[str, ...] = ()
    """Names of those that are there and not null."""
    problem: SteeringError | None = None
    """What is wrong with the body in a way that its parsed form no longer shows."""


def may_hold_fields(data: bytes) -> bool:
    """Whether a piece of JSON text can hold one of our names as a key; errs on the side of yes."""
    return (
        (b"steering" in data and (b'"steering' in data or b'steering_vectors"' in data))
        or b'"capture"' in data
        or (b"\\" in data and b"\\u00" in data and _ESCAPED_LETTER.search(data) is not None)
    )


def is_utf8(body: bytes) -> bool:
    """Whether a JSON body is in UTF-8; in JSON's other encodings :func:`may_hold_fields` sees nothing."""
    return json.detect_encoding(body[:4]).startswith("utf-8")


def form_field(data: bytes) -> str | None:
    """The field of ours that a piece of a multipart form names, if any."""
    if b"steering" not in data and b"capture" not in data:
        return None
    names = (_FORM_NAME.search(part[1]) for part in _FORM_PART.finditer(data))
    return next((name[1].decode().lower() for name in names if name), None)


def event_field(event: bytes) -> str | None:
    """The field of ours that an event of a WebSocket has, at its top or in its session, if any."""
    if not may_hold_fields(event):
        return None
    found = find_fields(event, _OF_EVENTS)
    return found.fields[0] if found.fields else None


def find_fields(body: bytes, places: tuple[str, ...] = _WRONG_PLACES) -> Found:
    """Look through a whole JSON body, in which fields at ``places`` are wrong. Malformed JSON has no fields: whoever
    parses it next refuses it."""
    try:
        document = json.loads(body, object_pairs_hook=_object)
    except json.JSONDecodeError:
        return Found()
    except (ValueError, RecursionError) as error:  # endless numbers, wrong encodings, deep nesting
        reason = str(error).partition(";")[0]  # the rest is advice to Python programmers
        return Found(problem=SteeringError("body", f"cannot be read as JSON: {reason}"))
    if not isinstance(document, dict):
        return Found()
    for place in places:
        inner: Any = document
        for key in place.split("."):
            inner = inner.get(key) if isinstance(inner, dict) else None
        for name in FIELDS:
            if isinstance(inner, dict) and _is_ours(name, inner):
                problem = SteeringError(f"{place}.{name}", f"would be ignored there; {name} goes at the body's top")
                return Found((name,), problem)
    fields = tuple(name for name in FIELDS if document.get(name) is not None or name in _twice(document))
    return Found(fields, _duplicate(document, fields))


def _is_ours(name: str, inner: dict[str, Any]) -> bool:
    # Others may call something of theirs `capture`, but it would not be an object.
    return name in inner and (name != CAPTURE_FIELD or isinstance(inner[name], dict))


class _Repeating(dict[str, Any]):
    """A JSON object in which keys stood more than once: ``twice`` names them."""

    twice: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # A body can have millions of objects: what is done for each has to be little.
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    counts = Counter(key for key, _ in pairs)
    repeating = _Repeating(made)
    repeating.twice = tuple(key for key, count in counts.items() if count > 1)
    return repeating


def _twice(value: dict[str, Any]) -> tuple[str, ...]:
    return value.twice if isinstance(value, _Repeating) else ()


def _duplicate(document: dict[str, Any], fields: tuple[str, ...]) -> SteeringError | None:
    for name in fields:
        if name in _twice(document):
            return SteeringError(name, "stands twice in the body, and one would be ignored; give it once")
        found = _duplicate_inside(document[name], name == CAPTURE_FIELD, _DEPTH)
        if found is not None:
            return SteeringError(f"{name}{found[0]}", f"has {found[1]} twice, and one would be ignored; give it once")
    return None


def _step(key: str) -> str:
    """A key as a step of a path; half surrogate pairs and what would draw over a terminal are escaped."""
    short = shown(key).strip("'")
    return f"[{short}]" if short.isdecimal() else f".{short}"


def _duplicate_inside(value: Any, in_lists: bool, depth: int) -> tuple[str, str] | None:
    """Where in ``value``, as the rest of a path, and which key.

    Lists are looked into at the top, for ``steering`` is one, and else only if ``in_lists``: most hold many numbers.
    """
    if isinstance(value, dict):
        if twice := _twice(value):
            return "", shown(twice[0])
        inner = [(_step(key), item) for key, item in value.items() if isinstance(item, (dict, list))]
    elif isinstance(value, list) and (in_lists or depth == _DEPTH):
        inner = [(f"[{i}]", item) for i, item in enumerate(value) if isinstance(item, (dict, list))]
    else:
        return None
    if depth > 0:
        for step, item in inner:
            found = _duplicate_inside(item, in_lists, depth - 1)
            if found is not None:
                return step + found[0], found[1]
    return None

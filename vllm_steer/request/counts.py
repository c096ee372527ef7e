# SPDX-License-Identifier: Apache-2.0
"""Counts of what a request lists. They are checked before anything in the lists is read, which takes far longer."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_EDITS, MAX_LISTED, MAX_TOTAL_CONDITIONS
from vllm_steer.request.edit_fields import GENERAL_FIELD, SHORT_FIELDS

_LISTS = ("tokens", "positions", "layers")
"""Keys of edits, readouts, conditions and captures that may have long lists."""


def count_edits(fields: Mapping[str, Any]) -> int:
    """Return the number of edits in the fields of a request; values of a wrong type count as none."""
    general = fields.get(GENERAL_FIELD)
    vectors = (fields.get(name) for name in SHORT_FIELDS)
    by_layer = (layers for points in vectors if isinstance(points, Mapping) for layers in points.values())
    return _length(general) + sum(len(layers) for layers in by_layer if isinstance(layers, Mapping))


def count_directions(fields: Mapping[str, Any]) -> int:
    """Return the number of distinct directions in the subspaces of edits, which take long to decompose."""
    found = {}
    for edit in _objects(fields, GENERAL_FIELD):
        subspace = edit.get("subspace")
        shape = subspace.get("shape") if isinstance(subspace, Mapping) else None
        count = _length(subspace) if shape is None else next(iter(shape), 0) if isinstance(shape, list) else 0
        if isinstance(count, int) and count > 0:
            with suppress(OverflowError, RecursionError, TypeError, UnicodeEncodeError):  # its parser refuses it
                found[msgspec.msgpack.encode(subspace)] = count
    return sum(found.values())


def check_counts(fields: Mapping[str, Any]) -> None:
    """Raise SteeringError for fields of a request that list too much in all; wrong values are left to their parsers."""
    edits = count_edits(fields)
    if edits > MAX_EDITS:
        raise SteeringError(GENERAL_FIELD, f"has {edits} edits; a request has at most {MAX_EDITS}, modules not counted")
    conditions = sum(len(each) for each in map(_conditions, _objects(fields, GENERAL_FIELD)))
    if conditions > MAX_TOTAL_CONDITIONS:
        raise SteeringError(
            GENERAL_FIELD, f"has {conditions} conditions in `when`; no engine allows more than {MAX_TOTAL_CONDITIONS}"
        )
    listed = {name: sum(map(_listed, _objects(fields, name))) for name in fields}
    if sum(listed.values()) > MAX_LISTED:
        longest = max(listed, key=lambda name: listed[name])
        raise SteeringError(
            longest,
            f"lists {listed[longest]} positions, pairs and layers; a request lists at most {MAX_LISTED} in all, so "
            "write ranges as [start, stop] pairs, or send several requests",
        )


def _objects(fields: Mapping[str, Any], name: str) -> Iterator[Mapping[Any, Any]]:
    """Return the edits, readouts, conditions or captures in a field."""
    value = fields.get(name)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return (item for item in items if isinstance(item, Mapping))


def _conditions(edit: Mapping[Any, Any]) -> list[Any]:
    when = edit.get("when")
    return when if isinstance(when, list) else [] if when is None else [when]


def _listed(item: Mapping[Any, Any]) -> int:
    """Return the number of items in the lists of an edit, readout, condition or capture."""
    count = sum(_list_length(item.get(key)) for key in _LISTS)
    if isinstance(hooks := item.get("hooks"), Mapping):
        count += sum(map(_length, hooks.values()))
    return count + sum(_listed(each) for each in _conditions(item) if isinstance(each, Mapping) and "when" not in each)


def _list_length(value: object) -> int:
    return _length(value.get("generated") if isinstance(value, Mapping) else value)


def _length(value: object) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 0

# SPDX-License-Identifier: Apache-2.0
"""Parsing of a request's steering fields to edits."""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_EDITS
from vllm_steer.points import PointName
from vllm_steer.request.edit import ARGUMENT_ALIASES, ARGUMENTS, Edit
from vllm_steer.request.scalars import did_you_mean, read_choice, read_number, shown
from vllm_steer.request.selector import Selector, SelectorName
from vllm_steer.request.sites import read_layer, read_point
from vllm_steer.request.vector import PACKED_KEYS, width_error

# Vector fields, and the tokens that their edits cover.
SHORT_FIELDS: Mapping[str, SelectorName] = MappingProxyType(
    {
        "steering_vectors": "all",
        "prefill_steering_vectors": "prompt",
        "decode_steering_vectors": "generated",
    }
)
GENERAL_FIELD = "steering"
FIELD_NAMES: tuple[str, ...] = (*SHORT_FIELDS, GENERAL_FIELD)
_FIRST = FIELD_NAMES[0]

_GATE_OF_OTHERS = (
    "is a gate of RhizoNymph/vllm (apply, scope); write an edit whose when names a readout, with the window token for "
    "the scope this_token, previous for next_step, and latch for rest_of_request"
)
_EXPRESSION = "in Python, pass Expression.parse(text).edits(vectors) of vllm_steer.lab"
_DECIMAL = re.compile("0|-?[1-9][0-9]{0,8}")


def parse_fields(fields: Mapping[str, Any]) -> tuple[Edit, ...]:
    """Parse the steering fields of one request.

    Args:
        fields: Values by name in `FIELD_NAMES`; None counts as absent. The vector fields are
            ``{point: {layer: vector}}``. A vector has any form that `parse_vector` accepts, or is
            ``{"vector": ..., "scale": ...}``; a layer is an int or its decimal string. ``steering`` is a list of `Edit`
            or of dicts of its arguments, or one `Edit`.

    Returns:
        The edits in the order in which they apply: first the vector fields in the order of `FIELD_NAMES`, then
        ``steering`` in the order given.

    Raises:
        SteeringError: A field is unknown, a value is invalid, the vectors differ in width, or there are more than
            4096 edits. Its ``field`` is the path of the invalid value.
    """
    return tuple(edit for _, edit in parse_fields_with_paths(fields))


def parse_fields_with_paths(fields: Mapping[str, Any]) -> list[tuple[str, Edit]]:
    """Parse like :func:`parse_fields`, and return each edit with the path of its value."""
    if not isinstance(fields, Mapping):
        raise SteeringError(GENERAL_FIELD, f"the fields must be a mapping, not {shown(fields)}")
    for name in fields:
        read_choice(name, FIELD_NAMES, "fields")
    return collect_edits(_all_edits(fields))


def _all_edits(fields: Mapping[str, Any]) -> Iterator[tuple[str, Edit]]:
    for name, tokens in SHORT_FIELDS.items():
        if fields.get(name) is not None:
            yield from read_vectors(fields[name], name, tokens)
    if fields.get(GENERAL_FIELD) is not None:
        yield from read_edits(fields[GENERAL_FIELD], GENERAL_FIELD)


def collect_edits(edits: Iterable[tuple[str, Edit]]) -> list[tuple[str, Edit]]:
    """Return the paths and edits as a list; raise SteeringError if they are too many or differ in width."""
    collected: list[tuple[str, Edit]] = []
    first: tuple[str, Edit] | None = None
    for path, edit in edits:
        if len(collected) == MAX_EDITS:
            raise SteeringError(path, f"exceeds the limit of {MAX_EDITS} edits in one request")
        if edit.width:  # edits of features have the width of their autoencoder
            first = first or (path, edit)
            if edit.width != first[1].width:
                raise width_error(path, edit.width, first[0], first[1].width)
        collected.append((path, edit))
    return collected


def read_vectors(value: object, field: str, tokens: SelectorName) -> Iterator[tuple[str, Edit]]:
    """Yield an edit, with its path, for each vector of ``{point: {layer: vector}}``."""
    selector = Selector(tokens)
    points: set[PointName] = set()
    for point_key, by_layer in _items(value, field, '{point: {layer: vector}} such as {"post_block": {"12": vector}}'):
        point = read_point(point_key, field, '{"post_block": {"12": vector}}')
        if point in points:
            raise SteeringError(field, f"names {point} twice, the second time as {shown(point_key)}; join the layers")
        points.add(point)
        at_point = f"{field}.{point}"
        seen: set[int] = set()
        for layer_key, given in _items(by_layer, at_point, '{layer: vector} such as {"12": vector}'):
            layer = _read_layer_key(layer_key, at_point)
            if layer in seen:
                raise SteeringError(at_point, f"has layer {layer} twice, as a number and as a string; give it once")
            seen.add(layer)
            path = f"{at_point}[{layer}]"
            vector, vector_path, scale = _vector_and_scale(given, path)
            try:
                edit = Edit(kind="add", point=point, layers=layer, vector=vector, strength=scale, tokens=selector)
            except SteeringError as error:  # from the vector; the other arguments are valid
                raise SteeringError(vector_path + error.field.removeprefix("vector"), error.problem) from None
            yield path, edit


def _items(value: object, field: str, form: str) -> Iterator[tuple[object, object]]:
    if not isinstance(value, Mapping):
        raise SteeringError(field, f"must be {form}, not {shown(value)} ({type(value).__name__})")
    if not value:
        raise SteeringError(field, f"is empty; give {form}, or omit it")
    return iter(value.items())


def _read_layer_key(key: object, field: str) -> int:
    if isinstance(key, str):
        if not _DECIMAL.fullmatch(key):
            hint = '; for all layers use steering=[{"layers": "all", ...}]' if key == "all" else ""
            raise SteeringError(field, f'layer keys must be decimal integers such as "15", not {shown(key)}{hint}')
        key = int(key)
    return read_layer(key, field)


def _vector_and_scale(given: object, path: str) -> tuple[Any, str, float]:
    """Return the vector's value, its path, and the scale."""
    if not isinstance(given, Mapping) or (PACKED_KEYS & set(given) and "vector" not in given):
        return given, path, 1.0
    unknown = [key for key in given if key not in ("vector", "scale")]
    if unknown or "vector" not in given:
        raise SteeringError(
            path,
            'must be a vector, {"vector": ..., "scale": ...} or a packed vector (dtype, shape, data); '
            + (f"unknown keys: {shown(unknown)}" if unknown else "vector is missing")
            + ("; did you mean scale?" if any(ARGUMENT_ALIASES.get(key, key) == "strength" for key in unknown) else ""),
        )
    return given["vector"], f"{path}.vector", read_number(given.get("scale", 1.0), f"{path}.scale")


def read_edits(value: object, field: str) -> Iterator[tuple[str, Edit]]:
    """Yield the edits, with their paths, of a list of `Edit` or of dicts, or of one `Edit`."""
    if isinstance(value, Edit):
        value = [value]
    if isinstance(value, str):
        raise SteeringError(field, f"{shown(value)} is an expression, which names modules of a server; {_EXPRESSION}")
    if not isinstance(value, (list, tuple)):
        hint = ""
        if isinstance(value, Mapping):
            is_edit = "kind" in value or "vector" in value
            hint = "; put the edit in a list" if is_edit else f"; {{point: {{layer: vector}}}} belongs in {_FIRST}"
        raise SteeringError(field, f"must be a list of edits, not {shown(value)} ({type(value).__name__}){hint}")
    if not value:
        raise SteeringError(field, "is empty; give an edit, or omit the field")
    for i, item in enumerate(value):
        path = f"{field}[{i}]"
        yield path, item if isinstance(item, Edit) else _read_edit(item, path)


def _read_edit(item: object, path: str) -> Edit:
    if not isinstance(item, Mapping):
        raise SteeringError(path, f"must be an Edit or a dict of its arguments, not {shown(item)}")
    unknown = [key for key in item if key not in ARGUMENTS]
    if "apply" in unknown:
        raise SteeringError(path, _GATE_OF_OTHERS)
    if unknown:
        hint = did_you_mean(unknown[0], ARGUMENTS, ARGUMENT_ALIASES)
        raise SteeringError(path, f"unknown key {shown(unknown[0])}; an edit has {', '.join(ARGUMENTS)}{hint}")
    if "kind" not in item:
        raise SteeringError(f"{path}.kind", "is missing; an edit needs kind")
    if item.get("tokens", "all") is None:
        raise SteeringError(f"{path}.tokens", "must not be null; omit it for the default")
    if item.get("dose", 0) is None and item.get("strength") is None:  # as JSON has NaN
        raise SteeringError(f"{path}.dose", "is null, without a strength beside it; give a number, or omit it")
    try:
        return Edit(**item)
    except SteeringError as error:
        raise SteeringError(f"{path}.{error.field}", error.problem) from None

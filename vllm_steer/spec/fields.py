# SPDX-License-Identifier: Apache-2.0
"""The steering fields of a request, as users and HTTP bodies give them, to edits."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_EDITS
from vllm_steer.points import POINT_NAMES
from vllm_steer.spec.edit import Edit, read_layer
from vllm_steer.spec.scalars import read_choice, read_number, shown
from vllm_steer.spec.selector import Selector, SelectorName
from vllm_steer.spec.vector import PACKED_KEYS

# Field of the short form -> the tokens that its edits cover.
SHORT_FIELDS: Mapping[str, SelectorName] = MappingProxyType(
    {
        "steering_vectors": "all",
        "prefill_steering_vectors": "prompt",
        "decode_steering_vectors": "generated",
    }
)
GENERAL_FIELD = "steering"
FIELD_NAMES: tuple[str, ...] = (*SHORT_FIELDS, GENERAL_FIELD)


_EDIT_PARAMETERS = inspect.signature(Edit).parameters
_REQUIRED = tuple(name for name, p in _EDIT_PARAMETERS.items() if p.default is p.empty)
_DECIMAL = re.compile("0|[1-9][0-9]{0,8}")


def parse_fields(fields: Mapping[str, Any]) -> tuple[Edit, ...]:
    """Read all steering fields of one request.

    Args:
        fields: values by name, each name one of `FIELD_NAMES`; None counts as absent.
            The three short fields are ``{point: {layer: vector}}``, a vector being what `parse_vector`
            reads or ``{"vector": ..., "scale": ...}``; a layer is an int or its decimal string.
            ``steering`` is a list of `Edit` or of dicts of its arguments, or one `Edit`.

    Returns:
        The edits in the order in which they apply: of the short fields in the order of `FIELD_NAMES`,
        then of ``steering``, in the order given. Empty if nothing is given.

    Raises:
        SteeringError: a field is unknown or its value wrong, the vectors differ in width, or there are
            more than 4096 edits. Its ``field`` is the path of the offending value.
    """
    return tuple(edit for _, edit in parse_fields_with_paths(fields))


def parse_fields_with_paths(fields: Mapping[str, Any]) -> list[tuple[str, Edit]]:
    """Return the edits of :func:`parse_fields`, each with the path of the value that it comes from."""
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
    """The same paths and edits; raises SteeringError where they are too many or differ in width."""
    collected: list[tuple[str, Edit]] = []
    for path, edit in edits:
        if len(collected) == MAX_EDITS:
            raise SteeringError(path, f"is one edit more than the {MAX_EDITS} that a request may have")
        if collected and edit.vector.size != collected[0][1].vector.size:
            first, other = collected[0]
            raise SteeringError(
                path,
                f"has a vector of width {edit.vector.size}, but {first} one of {other.vector.size}; "
                "all vectors have the model's hidden size",
            )
        collected.append((path, edit))
    return collected


def read_vectors(value: object, field: str, tokens: SelectorName) -> Iterator[tuple[str, Edit]]:
    """The edits of a short form, ``{point: {layer: vector}}``, on ``tokens``, each with its path below ``field``."""
    selector = Selector(tokens)
    for point_key, by_layer in _entries(value, field, "{point: {layer: vector}}"):
        point = read_choice(point_key, POINT_NAMES, field)
        at_point = f"{field}.{point}"
        seen: set[int] = set()
        for layer_key, given in _entries(by_layer, at_point, "{layer: vector}"):
            layer = _layer_of_key(layer_key, at_point)
            if layer in seen:
                raise SteeringError(at_point, f"names layer {layer} twice, as a number and as a string")
            seen.add(layer)
            path = f"{at_point}[{layer}]"
            vector, place, scale = _vector_and_scale(given, path)
            try:
                edit = Edit(kind="add", point=point, layers=layer, vector=vector, strength=scale, tokens=selector)
            except SteeringError as error:  # of the vector: all else has been read
                raise SteeringError(place + error.field.removeprefix("vector"), error.problem) from None
            yield path, edit


def _entries(value: object, field: str, form: str) -> Iterator[tuple[object, object]]:
    if not isinstance(value, Mapping):
        raise SteeringError(field, f"must be {form}, not {shown(value)} ({type(value).__name__})")
    if not value:
        raise SteeringError(field, f"is empty; give {form}, or leave it out")
    return iter(value.items())


def _layer_of_key(key: object, field: str) -> int:
    if isinstance(key, str):
        if not _DECIMAL.fullmatch(key):
            raise SteeringError(field, f'a layer is its plain decimal number ("15"), not {shown(key)}')
        key = int(key)
    return read_layer(key, field)


def _vector_and_scale(given: object, path: str) -> tuple[Any, str, float]:
    """What stands for the vector, where it stands, and the scale."""
    if not isinstance(given, Mapping) or (PACKED_KEYS & set(given) and "vector" not in given):
        return given, path, 1.0
    unknown = [key for key in given if key not in ("vector", "scale")]
    if unknown or "vector" not in given:
        raise SteeringError(
            path,
            'must be a vector, {"vector": ..., "scale": ...} or a packed vector (dtype, shape, data); '
            + (f"unknown: {shown(unknown)}" if unknown else "vector is missing"),
        )
    return given["vector"], f"{path}.vector", read_number(given.get("scale", 1.0), f"{path}.scale")


def read_edits(value: object, field: str) -> Iterator[tuple[str, Edit]]:
    """The edits of the general form, a list of `Edit` or of dicts or one `Edit`, each with its path below ``field``."""
    if isinstance(value, Edit):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise SteeringError(field, f"must be a list of edits, not {shown(value)} ({type(value).__name__})")
    if not value:
        raise SteeringError(field, "is empty; give an edit, or leave it out")
    for i, item in enumerate(value):
        path = f"{field}[{i}]"
        yield path, item if isinstance(item, Edit) else _edit_of_dict(item, path)


def _edit_of_dict(item: object, path: str) -> Edit:
    if not isinstance(item, Mapping):
        raise SteeringError(path, f"must be an Edit or a dict of its fields, not {shown(item)}")
    unknown = [key for key in item if key not in _EDIT_PARAMETERS]
    if unknown:
        raise SteeringError(path, f"unknown field {shown(unknown[0])}; an edit has {', '.join(_EDIT_PARAMETERS)}")
    missing = [name for name in _REQUIRED if name not in item]
    if missing:
        raise SteeringError(f"{path}.{missing[0]}", "is missing; an edit needs " + ", ".join(_REQUIRED))
    try:
        return Edit(**item)
    except SteeringError as error:
        raise SteeringError(f"{path}.{error.field}", error.problem) from None

# SPDX-License-Identifier: Apache-2.0
"""Parsing of hook points and layers."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_LAYERS
from vllm_steer.points import POINT_NAMES, POINTS, PointName
from vllm_steer.spec.scalars import is_integer, read_choice, shown

Layers: TypeAlias = tuple[int, ...] | Literal["all"]
LayersInput: TypeAlias = int | list[int] | tuple[int, ...] | range | Literal["all"]

LayerForm = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)]
LayersForm = Annotated[
    LayerForm | Annotated[list[LayerForm], msgspec.Meta(min_length=1)] | Literal["all"],
    msgspec.Meta(description='One layer, a list of layers, or "all".'),
]
"""JSON form of layers."""

_TRANSFORMER_LENS_NAME = re.compile(r"blocks\.(?:\{i\}|[0-9]{1,9})\.hook_(\w+)")
_LAYER_NUMBER = re.compile("[0-9]{1,9}")


def _transformer_lens_names() -> Mapping[str, PointName]:
    names: dict[str, PointName] = {}
    for point in POINTS.values():
        match = _TRANSFORMER_LENS_NAME.fullmatch(point.aliases["TransformerLens"])
        if match is not None:
            names |= {name: point.name for name in (match[1], f"hook_{match[1]}") if name != point.name}
    return MappingProxyType(names)


_ALIASES = _transformer_lens_names()


def read_point(value: object, field: str, example: str = "") -> PointName:
    """Return a hook point.

    Args:
        value: Any object.
        field: Path of the value, for errors.
        example: Correct nesting of points and layers, if ``value`` is a key; for errors.

    Raises:
        SteeringError: ``value`` is not the name of a point.
    """
    if example and (is_integer(value) or (isinstance(value, str) and _LAYER_NUMBER.fullmatch(value))):
        raise SteeringError(
            field, f"the outer keys are hook points and the inner ones layers, as in {example}, not {shown(value)}"
        )
    full_path = _TRANSFORMER_LENS_NAME.fullmatch(value) if isinstance(value, str) else None
    aliases = _ALIASES if full_path is None else {value: _ALIASES.get(full_path[1], "")}
    return read_choice(value, POINT_NAMES, field, what="a hook point", aliases=aliases)


def read_layer(value: object, field: str) -> int:
    """Return a layer number given as a Python or numpy integer; raise SteeringError if it is not 0 to 4095."""
    if not is_integer(value):
        raise SteeringError(field, f"must be a layer number, not {shown(value)} ({type(value).__name__})")
    if not 0 <= value < MAX_LAYERS:
        hint = "; layers count from 0, and negative numbers are not supported" if value < 0 else ""
        raise SteeringError(field, f"must be between 0 and {MAX_LAYERS - 1}, not {shown(value)}{hint}")
    return int(value)


def read_layers(value: object, field: str) -> Layers:
    """Return the layers in ascending order, given as one number, a list, tuple or range of distinct ones, or "all"."""
    if isinstance(value, str) and value == "all":
        return "all"
    if not isinstance(value, (list, tuple, range)):
        if not is_integer(value):
            raise SteeringError(field, f'must be a layer number, a list of layer numbers or "all", not {shown(value)}')
        return (read_layer(value, field),)
    if not value:
        raise SteeringError(field, 'is empty; name a layer or "all"')
    if isinstance(value, range):  # check the ends first: a range can be longer than memory
        read_layer(value[0], field)
        read_layer(value[-1], field)
    seen: set[int] = set()
    for i, item in enumerate(value):
        layer = read_layer(item, f"{field}[{i}]")
        if layer in seen:
            raise SteeringError(f"{field}[{i}]", f"repeats layer {layer}; name each layer once")
        seen.add(layer)
    return tuple(sorted(seen))

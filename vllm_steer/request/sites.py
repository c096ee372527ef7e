# SPDX-License-Identifier: Apache-2.0
"""Parsing of hook points and layers."""

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_LAYERS
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.request.field_types import any_of
from vllm_steer.request.scalars import did_you_mean, is_integer, read_choice, shown
from vllm_steer.site_names import find_foreign_site, similar_name

if TYPE_CHECKING:
    import torch

Layers: TypeAlias = tuple[int, ...] | Literal["all"]
LayersInput: TypeAlias = (
    "int | list[int] | tuple[int, ...] | range | npt.NDArray[np.integer[Any]] | torch.Tensor | Literal['all']"
)

LayerForm = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)]
LayersForm = Annotated[
    LayerForm | Annotated[list[LayerForm], msgspec.Meta(min_length=1)] | Literal["all"],
    msgspec.Meta(description='One layer, a list of layers, or "all".'),
]
"""JSON form of layers."""
NAMES_LISTED = "`GET /v1/steering/capabilities` and `vllm-steer doctor MODEL` list the usual names of each point"
"""End of the descriptions of fields that accept the names of points in other libraries."""
PointForm = Annotated[
    Any,
    any_of(PointName, str),
    msgspec.Meta(description=f"Hook point, or its name in another library; {NAMES_LISTED}."),
]
"""JSON form of a hook point."""

OF_THE_MODEL = "below the model's number of layers"
"""Part of the error message about a layer number that no model has."""
_LAYER_NUMBER = re.compile("[0-9]{1,9}")


def read_point(value: object, field: str, example: str = "") -> PointName:
    """Return a hook point, given by our name or by a name of another library that states no layer.

    Args:
        value: Any object.
        field: Path of the value, for errors.
        example: Correct nesting of points and layers, if ``value`` is a key; for errors.

    Raises:
        SteeringError: ``value`` is not the name of a point.
    """
    point, layer = read_site(value, field, example)
    if layer is not None:
        raise SteeringError(field, f"{shown(value)} names layer {layer}, which does not belong here; use {point!r}")
    return point


def read_site(value: object, field: str, example: str = "") -> tuple[PointName, int | None]:
    """Return a hook point, and the layer if ``value`` is a name of another library that states one.

    Args:
        value: Any object.
        field: Path of the value, for errors.
        example: Correct nesting of points and layers, if ``value`` is a key; for errors.

    Raises:
        SteeringError: ``value`` is not the name of a point, or its meaning depends on the model.
    """
    if example and (is_integer(value) or (isinstance(value, str) and _LAYER_NUMBER.fullmatch(value))):
        raise SteeringError(
            field, f"the outer keys are hook points and the inner ones layers, as in {example}, not {shown(value)}"
        )
    if isinstance(value, str) and value not in POINT_NAMES:
        if (found := find_foreign_site(value)) is not None:
            if found.point is None or not found.name.accepted or (found.number or 0) < 0:
                raise SteeringError(field, f"{shown(value)} {found.problem}")
            return found.point, None if found.layer is None else read_layer(found.layer, field)
        if (similar := similar_name(value)) is not None:
            known = ", ".join(POINT_NAMES)
            raise SteeringError(
                field, f"{shown(value)} is not a hook point; use one of {known}; did you mean {similar}?"
            )
    return read_choice(value, POINT_NAMES, field, what="a hook point"), None


def read_layers_of(named: int | None, layers: object, point: PointName | None, field: str = "layers") -> Layers:
    """Return the layers of an edit whose point may have named one already.

    Args:
        named: Layer in the name of the point, or None.
        layers: The value of ``field``; None if absent.
        point: The point, for errors.
        field: Path of the value, for errors.

    Raises:
        SteeringError: ``layers`` is invalid, missing, or differs from ``named``.
    """
    if layers is None:
        if named is None:
            raise SteeringError(field, f'is missing; name layers of {point} or "all"')
        return (named,)
    checked = read_layers(layers, field)
    if named is not None and checked != (named,):
        raise SteeringError(field, f"is {shown(layers)}, but the point names layer {named}; omit one of them")
    return checked


def read_layer(value: object, field: str) -> int:
    """Return a layer number given as a Python or numpy integer; raise SteeringError if it is not 0 to 4095."""
    if not is_integer(value):
        hint = "; convert it with int()" if hasattr(value, "item") else ""
        raise SteeringError(field, f"must be a layer number, not {shown(value)} ({type(value).__name__}){hint}")
    if not 0 <= value < MAX_LAYERS:
        hint = "; layers count from 0, and negative numbers are not supported" if value < 0 else ""
        raise SteeringError(
            field, f"must be between 0 and {MAX_LAYERS - 1} and {OF_THE_MODEL}, not {shown(value)}{hint}"
        )
    return int(value)


def read_layer_of(named: int | None, layer: object) -> int | None:
    """Return the value of a field ``layer`` whose point may have named one already; None if neither is given.

    Raises:
        SteeringError: ``layer`` is invalid, or differs from ``named``.
    """
    checked = named if layer is None else read_layer(layer, "layer")
    if named not in (None, checked):
        raise SteeringError("layer", f"is {checked}, but the point names layer {named}; omit one of them")
    return checked


def read_layers(value: object, field: str) -> Layers:
    """Return the layers in ascending order.

    Args:
        value: One number; a list, tuple, range, numpy array or torch tensor of distinct ones; or ``"all"``.
        field: Path of the value, for errors.

    Raises:
        SteeringError: ``value`` has another form, or a number is not 0 to 4095.
    """
    if isinstance(value, str) and value == "all":
        return "all"
    value = _without_array(value, field)
    if not isinstance(value, (list, tuple, range)):
        if not is_integer(value):
            raise SteeringError(
                field,
                'must be a layer number, a list, range or integer array of layer numbers, or "all", '
                f"not {shown(value)}{_hint(value)}",
            )
        return (read_layer(value, field),)
    if not value:
        raise SteeringError(field, 'is empty; name a layer or "all"')
    if isinstance(value, range):  # check the ends first: a range can be longer than memory
        read_layer(value[0], field)
        read_layer(value[-1], field)
    elif len(value) > MAX_LAYERS:
        raise SteeringError(field, f"has {len(value)} layers; at most {MAX_LAYERS} can be named")
    elif set(map(type, value)) == {int}:
        distinct = set(value)
        if len(distinct) == len(value) and min(distinct) >= 0 and max(distinct) < MAX_LAYERS:
            return tuple(sorted(distinct))
    seen: set[int] = set()
    for i, item in enumerate(value):
        layer = read_layer(item, f"{field}[{i}]")
        if layer in seen:
            raise SteeringError(f"{field}[{i}]", f"repeats layer {layer}; name each layer once")
        seen.add(layer)
    return tuple(sorted(seen))


def _without_array(value: Any, field: str) -> object:
    """Return a numpy array or torch tensor of integers as an int or a list of ints, and other objects unchanged."""
    torch: Any = sys.modules.get("torch")
    if isinstance(value, np.ndarray):
        integers, has_data = value.dtype.kind in "iu", True
    elif torch is not None and isinstance(value, torch.Tensor):
        integers = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        has_data = not value.is_meta and value.layout == torch.strided
    else:
        return value
    if not integers or value.ndim > 1 or not has_data:
        raise SteeringError(
            field,
            f"is an array of dtype {value.dtype} and shape {shown(list(value.shape))}"
            + ("" if has_data else " without data")
            + '; layers are a one-dimensional array of integers, or "all"',
        )
    if value.ndim and len(value) > MAX_LAYERS:
        raise SteeringError(field, f"has {len(value)} layers; at most {MAX_LAYERS} can be named")
    layers: object = value.tolist()
    return layers


def _hint(value: object) -> str:
    """Return how to write ``value`` as layers, as the end of an error message."""
    if isinstance(value, str):
        return f"; write {value} without quotes" if _LAYER_NUMBER.fullmatch(value) else did_you_mean(value, ["all"])
    if isinstance(value, slice):
        return "; use range(start, stop)"
    return "; use list(...)" if hasattr(value, "__iter__") else ""

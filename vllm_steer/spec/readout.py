# SPDX-License-Identifier: Apache-2.0
"""Readouts: numbers that the engine computes from the stream at one site, for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_LAYERS, MAX_READOUTS
from vllm_steer.points import PointName
from vllm_steer.spec.json_schema import any_of
from vllm_steer.spec.projection import NamedProjection, Projection
from vllm_steer.spec.references import read_name
from vllm_steer.spec.scalars import read_number, shown
from vllm_steer.spec.selector import POSITIONS, PositionListForm, PositionsName, Selector
from vllm_steer.spec.sites import PointForm, read_layer, read_site
from vllm_steer.spec.vector import PackedVector, VectorForm, parse_vector

READOUTS_FIELD = "readouts"
ReadoutKind = Literal["probe", "projections"]
_EXAMPLE = '{"refusal": {"probe": weights, "bias": 0.0, "point": "post_block", "layer": 14}}'


class ReadoutForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A readout: `probe` or `projections` of the stream after the edits of one site."""

    probe: Annotated[
        Any,
        any_of(VectorForm, str),
        msgspec.Meta(description="Weights w of `x.w + bias`, or the probe of a registered module, `module/probe`."),
    ] = None
    projections: Annotated[
        Any,
        any_of(list[VectorForm], PackedVector, list[str]),
        msgspec.Meta(description="Directions, each with one product per token, or probes of registered modules."),
    ] = None
    bias: Annotated[float, msgspec.Meta(description="`probe` only: added to the product.")] = 0.0
    sigmoid: Annotated[bool, msgspec.Meta(description="`probe` only: return sigmoid(x.w + bias).")] = False
    point: PointForm
    layer: Annotated[
        Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)] | None,
        msgspec.Meta(description="Omitted if the name of the point has a layer."),
    ] = None
    positions: Annotated[
        PositionsName | PositionListForm,
        msgspec.Meta(description="Tokens that are returned. Gates and stops also compute the tokens that they need."),
    ] = "all_generated"


@dataclass(frozen=True)
class Readout:
    """A checked readout."""

    name: str
    kind: ReadoutKind
    directions: Projection | NamedProjection
    """One direction for a probe."""
    bias: float
    sigmoid: bool
    point: PointName
    layer: int
    tokens: Selector
    """Tokens whose values are returned."""


def parse_readouts(value: object) -> tuple[Readout, ...]:
    """Parse the ``readouts`` field: a mapping from names to mappings of :class:`ReadoutForm`'s fields, or None.

    Raises:
        SteeringError: ``value`` has another form. Its ``field`` is the path of the invalid value.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise SteeringError(READOUTS_FIELD, f"must be a dict such as {_EXAMPLE}, not {shown(value)}")
    if not 1 <= len(value) <= MAX_READOUTS:
        raise SteeringError(READOUTS_FIELD, f"has {len(value)} readouts; give 1 to {MAX_READOUTS}, or omit it")
    return tuple(_read(read_name(name, READOUTS_FIELD), given) for name, given in value.items())


def _read(name: str, value: object) -> Readout:
    field = f"{READOUTS_FIELD}.{name}"
    names = ReadoutForm.__struct_fields__
    if not isinstance(value, Mapping):
        raise SteeringError(field, f"must be a dict with {', '.join(names)}, not {shown(value)}")
    unknown = [key for key in value if key not in names]
    if unknown:
        hint = "; give one layer" if unknown[0] == "layers" else ""
        raise SteeringError(field, f"unknown key {shown(unknown[0])}; use {', '.join(names)}{hint}")
    kinds: list[ReadoutKind] = [each for each in ("probe", "projections") if value.get(each) is not None]
    if len(kinds) != 1:
        raise SteeringError(field, "give either probe or projections, and only one of them")
    kind = kinds[0]
    if "point" not in value:
        raise SteeringError(f"{field}.point", "is missing; a readout needs point and layer")
    point, named = read_site(value["point"], f"{field}.point")
    given = value.get("layer")
    if named is None and given is None:
        raise SteeringError(f"{field}.layer", "is missing; a readout needs point and layer")
    layer = read_layer(named if given is None else given, f"{field}.layer")
    if named is not None and layer != named:
        raise SteeringError(f"{field}.layer", f"is {layer}, but the point names layer {named}; omit one of them")
    if kind == "projections":
        for key in ("bias", "sigmoid"):
            if key in value:
                raise SteeringError(f"{field}.{key}", "is a parameter of probe only; omit it")
    sigmoid = value.get("sigmoid", False)
    if not isinstance(sigmoid, bool):
        raise SteeringError(f"{field}.sigmoid", f"must be true or false, not {shown(sigmoid)}")
    return Readout(
        name,
        kind,
        _read_directions(value[kind], kind, f"{field}.{kind}"),
        read_number(value.get("bias", 0.0), f"{field}.bias"),
        sigmoid,
        point,
        layer,
        Selector.parse(_position_name(value.get("positions", "all_generated")), f"{field}.positions"),
    )


def _position_name(value: Any) -> Any:
    return next((selector for name, selector in POSITIONS.items() if value == name), value)


def _read_directions(value: Any, kind: ReadoutKind, field: str) -> Projection | NamedProjection:
    if kind == "probe":
        return (
            NamedProjection.parse([value], field)
            if isinstance(value, str)
            else Projection([parse_vector(value, field)], field)
        )
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
        return NamedProjection.parse(value, field)
    return Projection(value, field)

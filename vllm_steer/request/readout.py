# SPDX-License-Identifier: Apache-2.0
"""Readouts: numbers that the engine computes from the stream at one site, for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_LAYERS, MAX_READOUTS, MAX_TOP_K
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.request.declared import any_of
from vllm_steer.request.mlp import NO_COSINE, MlpForm, MlpProbe, is_mlp
from vllm_steer.request.part import PartName, PromptPartName, SpanForm
from vllm_steer.request.probe import READING
from vllm_steer.request.projection import NamedProjection, Projection
from vllm_steer.request.references import parse_probe, read_name
from vllm_steer.request.scalars import is_integer, read_number, shown
from vllm_steer.request.selector import POSITIONS, PositionListForm, PositionsName, Selector
from vllm_steer.request.sites import PointForm, read_layer, read_site
from vllm_steer.request.vector import PackedVector, VectorForm, parse_vector

READOUTS_FIELD = "readouts"
ReadoutKind = Literal["probe", "projections", "lens", "sae"]
_KINDS: tuple[ReadoutKind, ...] = ("probe", "projections", "lens", "sae")
_PARAMETERS: Mapping[str, ReadoutKind] = {
    "bias": "probe",
    "sigmoid": "probe",
    "cosine": "probe",
    "layers": "lens",
    "top_k": "sae",
}
"""Keys that one kind alone has."""
_EXAMPLE = '{"refusal": {"probe": weights, "bias": 0.0, "point": "post_block", "layer": 14}}'


LayerNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)]
TopK = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOP_K)]


class LensForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The likeliest tokens if the model ended at a layer: its final norm and unembedding on the stream there."""

    top_k: Annotated[TopK, msgspec.Meta(description="Number of tokens.")] = 5


class ReadoutForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A readout: one of `probe`, `projections`, `lens` and `sae`, of the stream after the edits of a site."""

    probe: Annotated[
        Any,
        any_of(VectorForm, str, MlpForm),
        msgspec.Meta(
            description="Weights w of `x.w + bias`, a probe with a hidden layer, or the probe of a registered module, "
            "`module/probe`, with the bias, sigmoid, point and layer that it was registered with."
        ),
    ] = None
    projections: Annotated[
        Any,
        any_of(list[VectorForm], PackedVector, list[str]),
        msgspec.Meta(description="Directions, each with one product per token, or probes of registered modules."),
    ] = None
    bias: Annotated[float, msgspec.Meta(description="`probe` only: added to the product.")] = 0.0
    sigmoid: Annotated[bool, msgspec.Meta(description="`probe` only: return sigmoid(x.w + bias).")] = False
    cosine: Annotated[
        bool, msgspec.Meta(description="`probe` only: divide the product by the norms of the row and the weights.")
    ] = False
    lens: Annotated[
        LensForm | None, msgspec.Meta(description="Token ids and log-probabilities of the likeliest tokens, by layer.")
    ] = None
    sae: Annotated[
        str | None,
        msgspec.Meta(description="Name of a sparse autoencoder of the server: its strongest features."),
    ] = None
    top_k: Annotated[TopK, msgspec.Meta(description="`sae` only: number of features.")] = 8
    point: Annotated[
        PointForm | None,
        msgspec.Meta(
            description="Required, except for an `sae`, or a probe of a module, that names its own point and layer."
        ),
    ] = None
    layer: Annotated[
        LayerNumber | None,
        msgspec.Meta(
            description="Omitted if the name of the point has a layer, for a `lens` with `layers`, and where the point "
            "may be."
        ),
    ] = None
    layers: Annotated[
        list[LayerNumber] | None,
        msgspec.Meta(description="`lens` only: several layers."),
    ] = None
    positions: Annotated[
        PositionsName | PartName | PromptPartName | PositionListForm | SpanForm,
        msgspec.Meta(description="Tokens that are returned. Gates and stops also compute the tokens that they need."),
    ] = "all_generated"


@dataclass(frozen=True)
class Readout:
    """A checked readout."""

    name: str
    kind: ReadoutKind
    directions: Projection | NamedProjection | None
    """One direction for a probe; None for `lens` and `sae`, and for a probe with a hidden layer."""
    bias: float
    sigmoid: bool
    point: PointName
    layer: int
    tokens: Selector
    """Tokens whose values are returned."""
    layers: tuple[int, ...] = ()
    """Layers of a `lens` or `sae`, of which ``layer`` is the first."""
    top_k: int = 0
    """Number of tokens or features per layer; 0 for other kinds."""
    sae: str = ""
    """Name of the autoencoder."""
    cosine: bool = False
    """Whether the product is divided by the norms of its factors."""
    mlp: MlpProbe | None = None
    """A probe with a hidden layer, instead of ``directions``."""
    omitted: tuple[str, ...] = ()
    """Fields that were not given, which the named probe or the autoencoder fills in."""


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
        raise SteeringError(field, f"unknown key {shown(unknown[0])}; use {', '.join(names)}")
    kinds = [each for each in _KINDS if value.get(each) is not None]
    if len(kinds) != 1:
        raise SteeringError(field, f"give one of {', '.join(_KINDS[:-1])} and {_KINDS[-1]}, and only one of them")
    kind = kinds[0]
    for key, owner in _PARAMETERS.items():
        if value.get(key) is not None and kind != owner:
            inside_lens = kind == "lens" and key in LensForm.__struct_fields__
            hint = "give one layer" if key == "layers" else "give it inside lens" if inside_lens else "omit it"
            raise SteeringError(f"{field}.{key}", f"is a parameter of {owner} only; {hint}")
    omitted: tuple[str, ...] = ()
    point, named_layer = (None, None) if value.get("point") is None else read_site(value["point"], f"{field}.point")
    if kind == "sae" or (kind == "probe" and isinstance(value["probe"], str)):
        fields = READING if kind == "probe" else ("point", "layer")
        omitted = tuple(key for key in fields if value.get(key) is None and (key != "layer" or named_layer is None))
    elif point is None:
        raise SteeringError(f"{field}.point", "is missing; a readout needs point and layer")
    sigmoid, cosine = (_read_switch(value, key, field) for key in ("sigmoid", "cosine"))
    layers = (0,) if "layer" in omitted else _read_layers(value, named_layer, field)
    top_k, sae = 0, ""
    if kind == "lens":
        top_k = _read_lens(value["lens"], f"{field}.lens")
    elif kind == "sae":
        top_k = _read_top_k(value.get("top_k", 8), f"{field}.top_k")
        sae = read_name(value["sae"], f"{field}.sae")
    mlp = MlpProbe.parse(value["probe"], f"{field}.probe") if kind == "probe" and is_mlp(value["probe"]) else None
    if mlp is not None and cosine:
        raise SteeringError(f"{field}.cosine", NO_COSINE)
    return Readout(
        name,
        kind,
        None if top_k or mlp else _read_directions(value[kind], kind, f"{field}.{kind}"),
        0.0 if "bias" in omitted else read_number(value.get("bias", 0.0), f"{field}.bias"),
        sigmoid,
        point or POINT_NAMES[0],
        layers[0],
        Selector.parse(_position_name(value.get("positions", "all_generated")), f"{field}.positions"),
        layers if top_k else (),
        top_k,
        sae,
        cosine,
        mlp,
        omitted,
    )


def _read_switch(value: Mapping[str, Any], key: str, field: str) -> bool:
    given = False if value.get(key) is None else value[key]
    if not isinstance(given, bool):
        raise SteeringError(f"{field}.{key}", f"must be true or false, not {shown(given)}")
    return given


def _read_layers(value: Mapping[str, Any], named: int | None, field: str) -> tuple[int, ...]:
    if value.get("layers") is None:
        given = value.get("layer")
        if given is None and named is None:
            raise SteeringError(f"{field}.layer", "is missing; give layer, or layers for a lens")
        layer = read_layer(named if given is None else given, f"{field}.layer")
        if named is not None and layer != named:
            raise SteeringError(f"{field}.layer", f"is {layer}, but the point names layer {named}; omit one of them")
        return (layer,)
    if named is not None:
        raise SteeringError(f"{field}.layers", f"must be omitted; the point names layer {named}")
    given = value["layers"]
    if value.get("layer") is not None:
        raise SteeringError(f"{field}.layer", "give either layer or layers")
    if not isinstance(given, (list, tuple)) or not given:
        raise SteeringError(f"{field}.layers", f"must be a list of layers such as [8, 16], not {shown(given)}")
    if len(given) > MAX_LAYERS:
        raise SteeringError(f"{field}.layers", f"has {len(given)} layers; at most {MAX_LAYERS} can be named")
    layers = tuple(read_layer(each, f"{field}.layers[{i}]") for i, each in enumerate(given))
    if len(set(layers)) != len(layers):
        raise SteeringError(f"{field}.layers", "names a layer twice")
    return layers


def _read_lens(value: object, field: str) -> int:
    if not isinstance(value, Mapping):
        raise SteeringError(field, f'must be a dict such as {{"top_k": 5}}, not {shown(value)}')
    for key in value:
        if key != "top_k":
            raise SteeringError(field, f"unknown key {shown(key)}; use top_k")
    return _read_top_k(value.get("top_k", 5), f"{field}.top_k")


def _read_top_k(value: object, field: str) -> int:
    if not is_integer(value) or not 1 <= value <= MAX_TOP_K:
        raise SteeringError(field, f"must be 1 to {MAX_TOP_K}, not {shown(value)}")
    return int(value)


def _position_name(value: Any) -> Any:
    # Comparing an array with a name would yield an array.
    return next((selector for name, selector in POSITIONS.items() if isinstance(value, str) and value == name), value)


def _read_directions(value: Any, kind: ReadoutKind, field: str) -> Projection | NamedProjection:
    if kind == "probe":
        return (
            NamedProjection((parse_probe(value, field),))
            if isinstance(value, str)
            else Projection([parse_vector(value, field)], field)
        )
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
        return NamedProjection.parse(value, field)
    return Projection(value, field)

# SPDX-License-Identifier: Apache-2.0
"""Readouts: numbers that the engine computes from the stream at one site, for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_LAYERS, MAX_READOUTS, MAX_TOP_K
from vllm_steer.request.field_types import Declared, Number, any_of, read
from vllm_steer.request.message_parts import PartName, PromptPartName, SpanForm
from vllm_steer.request.probe import NO_COSINE, READING, HiddenLayer, has_hidden_layer
from vllm_steer.request.projection import NamedProjection, Projection
from vllm_steer.request.references import parse_probe, read_name
from vllm_steer.request.scalars import is_integer, shown
from vllm_steer.request.selector import POSITIONS, PositionListForm, PositionsName, Selector
from vllm_steer.request.sites import LayerForm, Layers, PointForm, read_layer, read_layer_of, read_site
from vllm_steer.request.vector import PackedVector, VectorForm, parse_vector

READOUTS_FIELD = "readouts"
LENS, SAE_PREFIX = "lens", "sae:"
"""Heads: functions of a row of the stream with many outputs, of which the largest are recorded."""


@dataclass(frozen=True)
class ReadoutKind:
    """How a kind of readout is declared, computed, recorded and returned."""

    name: Literal["probe", "projections", "lens", "sae"]
    """The field of `Readout` that makes a readout one of this kind."""
    columns: tuple[str, ...]
    """Names of its numbers in JSON, beside ``positions``."""
    parameters: tuple[str, ...] = ()
    """Fields that no other kind has."""
    head: str = ""
    """Name of its head, or the beginning of the names; empty for products with vectors."""
    has_layers: bool = False
    """Whether its numbers have an axis for layers."""
    is_scalar: bool = False
    """Whether it has one number per token, which conditions and stops can look at."""

    @property
    def has_head(self) -> bool:
        """Whether the largest outputs of a head are recorded, each as its index and its value."""
        return bool(self.head)


KINDS: Mapping[str, ReadoutKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            ReadoutKind("probe", ("values",), ("bias", "sigmoid", "cosine"), is_scalar=True),
            ReadoutKind("projections", ("values",)),
            ReadoutKind("lens", ("token_ids", "logprobs"), ("layers",), LENS, has_layers=True),
            ReadoutKind("sae", ("indices", "values"), ("top_k",), SAE_PREFIX),
        )
    }
)
_EXAMPLE = '{"refusal": {"probe": weights, "bias": 0.0, "point": "post_block", "layer": 14}}'


DEFAULT_TOP_K = 5
"""Number of tokens of a lens."""
MAX_TOKEN = (1 << 24) - 1
"""Largest id of a token: larger numbers are not exact in the float32 numbers of a record."""
TopK = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOP_K)]

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]


class Lens(Declared, frozen=True):
    """The likeliest or the given tokens if the model ended at a layer: its final norm and unembedding on the stream."""

    top_k: Annotated[TopK | None, msgspec.Meta(description="Number of likeliest tokens; default 5.")] = None
    """The number of ``tokens``, if those are given, once read."""
    tokens: Annotated[
        Any,
        any_of(Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_TOP_K)], None),
        msgspec.Meta(description="Ids of the tokens whose log-probabilities are returned, instead of the likeliest."),
    ] = None
    """A tuple once read; None for the likeliest tokens."""

    def __post_init__(self) -> None:
        """Read the ids of tokens."""
        tokens: tuple[int, ...] = ()
        if self.tokens is not None:
            if not isinstance(self.tokens, (list, tuple)) or not 1 <= len(self.tokens) <= MAX_TOP_K:
                raise SteeringError("tokens", f"must be a list of 1 to {MAX_TOP_K} token ids, not {shown(self.tokens)}")
            for i, each in enumerate(self.tokens):
                if not is_integer(each) or not 0 <= each <= MAX_TOKEN:
                    problem = f"must be a token id, 0 to {MAX_TOKEN}, not {shown(each)}; the tokenizer gives it"
                    raise SteeringError(f"tokens[{i}]", problem)
            tokens = tuple(map(int, self.tokens))
            if len(set(tokens)) != len(tokens):
                raise SteeringError("tokens", f"{shown(list(tokens))} names a token id twice; name each once")
            if self.top_k not in (None, len(tokens)):
                raise SteeringError("top_k", "is the number of likeliest tokens; omit it with tokens")
        top_k = len(tokens) or self.top_k or DEFAULT_TOP_K
        msgspec.structs.force_setattr(self, "tokens", tokens or None)
        msgspec.structs.force_setattr(self, "top_k", top_k)


class Readout(Declared, frozen=True):
    """A readout: one of `probe`, `projections`, `lens` and `sae`, of the stream after the edits of a site."""

    probe: Annotated[
        Any,
        any_of(VectorForm, str, HiddenLayer),
        msgspec.Meta(
            description="Weights w of `x.w + bias`, a probe with a hidden layer, or the probe of a registered module, "
            "`module/probe`, with the bias, sigmoid, point and layer that it was registered with."
        ),
    ] = None
    """A `Projection` of one direction, `NamedProjection` or `HiddenLayer` once read."""
    projections: Annotated[
        Any,
        any_of(list[VectorForm], PackedVector, list[str]),
        msgspec.Meta(description="Directions, each with one product per token, or probes of registered modules."),
    ] = None
    """A `Projection` or `NamedProjection` once read."""
    bias: Annotated[Number | None, msgspec.Meta(description="`probe` only: added to the product; default 0.")] = None
    sigmoid: Annotated[
        bool | None, msgspec.Meta(description="`probe` only: return sigmoid(x.w + bias); default false.")
    ] = None
    cosine: Annotated[
        bool | None,
        msgspec.Meta(description="`probe` only: divide the product by the norms of the row and the weights."),
    ] = None
    lens: Annotated[
        Lens | None, msgspec.Meta(description="Token ids and log-probabilities of the likeliest tokens, by layer.")
    ] = None
    sae: Annotated[
        str | None,
        msgspec.Meta(description="Name of a sparse autoencoder of the server: its strongest features."),
    ] = None
    top_k: Annotated[TopK | None, msgspec.Meta(description="`sae` only: number of features; default 8.")] = None
    point: Annotated[
        Any,
        any_of(PointForm, None),
        msgspec.Meta(
            description="Required, except for an `sae`, or a probe of a module, that names its own point and layer."
        ),
    ] = None
    layer: Annotated[
        Any,
        any_of(LayerForm, None),
        msgspec.Meta(
            description="Omitted if the name of the point has a layer, for a `lens` with `layers`, and where the point "
            "may be."
        ),
    ] = None
    layers: Annotated[
        Any,
        any_of(list[LayerForm], Literal["all"], None),
        msgspec.Meta(description='`lens` only: several layers, or "all".'),
    ] = None
    """``"all"``, or a tuple once read."""
    positions: Annotated[
        Any,
        any_of(PositionsName, PartName, PromptPartName, PositionListForm, SpanForm),
        msgspec.Meta(description="Tokens that are returned. Gates and stops also compute the tokens that they need."),
    ] = "all_generated"
    """A `Selector` once read."""

    def __post_init__(self) -> None:
        """Check the rules between the fields, and read vectors, site and positions."""
        if sum(getattr(self, each) is not None for each in KINDS) != 1:
            *names, last = KINDS
            raise SteeringError("", f"give one of {', '.join(names)} and {last}, and only one of them")
        kind = self.kind
        for owner, key in ((each, key) for each in KINDS.values() for key in each.parameters):
            if getattr(self, key) is not None and kind is not owner:
                inside_lens = self.lens is not None and key in Lens.__struct_fields__
                hint = "give one layer" if key == "layers" else "give it inside lens" if inside_lens else "omit it"
                raise SteeringError(key, f"is a parameter of {owner.name} only; {hint}")
        point, named = (None, None) if self.point is None else read_site(self.point, "point")
        may_omit = self.sae is not None or isinstance(self.probe, str)
        if point is None and not may_omit:
            raise SteeringError("point", "is missing; a readout needs point and layer")
        without_layer = may_omit and self.layer is None and named is None and self.layers is None
        layers = () if without_layer else self._read_layers(named)
        every = layers == "all"
        positions = self.positions
        if isinstance(positions, str):  # comparing an array with a name would yield an array
            positions = POSITIONS.get(positions, positions)  # type: ignore[call-overload]
        checked: dict[str, Any] = {
            "point": point,
            "layer": layers[0] if layers and not every else None,
            "layers": layers,
            "positions": Selector.parse(positions, "positions"),
        }
        if self.sae is not None:
            read_name(self.sae, "sae")
            checked["top_k"] = 8 if self.top_k is None else self.top_k
        elif self.lens is not None:
            checked["top_k"] = self.lens.top_k
        else:
            checked[kind.name] = _read_directions(getattr(self, kind.name), kind.name)
            if self.cosine and isinstance(checked[kind.name], HiddenLayer):
                raise SteeringError("cosine", NO_COSINE)
        for name, value in checked.items():
            msgspec.structs.force_setattr(self, name, value)

    @property
    def kind(self) -> ReadoutKind:
        """The kind whose field is given."""
        return next(kind for name, kind in KINDS.items() if getattr(self, name) is not None)

    @property
    def omitted(self) -> tuple[str, ...]:
        """Fields that the named probe, the autoencoder or the model fills in."""
        if self.layers == "all":
            return ("layers",)
        fields = READING if isinstance(self.probe, NamedProjection) else ("point", "layer") if self.sae else ()
        return tuple(name for name in fields if getattr(self, name) is None)

    def _read_layers(self, named: int | None) -> Layers:
        """Return the layers; ``named`` is the one in the name of the point."""
        if self.layers is None:
            layer = read_layer_of(named, self.layer)
            if layer is None:
                raise SteeringError("layer", "is missing; give layer, or layers for a lens")
            return (layer,)
        if named is not None:
            raise SteeringError("layers", f"must be omitted; the point names layer {named}")
        if self.layer is not None:
            raise SteeringError("layer", "give either layer or layers")
        if isinstance(self.layers, str) and self.layers == "all":
            return "all"
        if not isinstance(self.layers, (list, tuple)) or not self.layers:
            raise SteeringError(
                "layers", f'must be a list of layers such as [8, 16], or "all", not {shown(self.layers)}'
            )
        if len(self.layers) > MAX_LAYERS:
            raise SteeringError("layers", f"has {len(self.layers)} layers; at most {MAX_LAYERS} can be named")
        layers = tuple(read_layer(each, f"layers[{i}]") for i, each in enumerate(self.layers))
        if len(set(layers)) != len(layers):
            raise SteeringError("layers", "names a layer twice")
        return layers


def parse_readouts(value: object) -> dict[str, Readout]:
    """Parse the ``readouts`` field: a mapping from names to mappings of :class:`Readout`'s fields, or None.

    Raises:
        SteeringError: ``value`` has another form. Its ``field`` is the path of the invalid value.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SteeringError(READOUTS_FIELD, f"must be a dict such as {_EXAMPLE}, not {shown(value)}")
    if not 1 <= len(value) <= MAX_READOUTS:
        raise SteeringError(READOUTS_FIELD, f"has {len(value)} readouts; give 1 to {MAX_READOUTS}, or omit it")
    return {
        read_name(name, READOUTS_FIELD): read(Readout, given, f"{READOUTS_FIELD}.{name}")
        for name, given in value.items()
    }


def _read_directions(value: Any, field: str) -> Projection | NamedProjection | HiddenLayer:
    """Return what the value of ``probe`` or ``projections`` describes."""
    if field == "probe":
        if has_hidden_layer(value):
            return read(HiddenLayer, value, field)
        if isinstance(value, str):
            return NamedProjection((parse_probe(value, field),))
        return Projection([parse_vector(value, field)], field)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
        return NamedProjection.parse(value, field)
    return Projection(value, field)

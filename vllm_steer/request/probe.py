# SPDX-License-Identifier: Apache-2.0
"""Probes of modules: weights, and the bias, sigmoid, point and layer with which they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.points import PointName
from vllm_steer.request.declared import any_of
from vllm_steer.request.matrix import is_matrix
from vllm_steer.request.mlp import HAS_HIDDEN_LAYER, MlpForm, MlpProbe
from vllm_steer.request.scalars import read_number, shown
from vllm_steer.request.sites import LayerForm, PointForm, read_layer, read_site
from vllm_steer.request.vector import PACKED_KEYS, PackedVector, Vector, VectorForm, parse_vector

READING = ("bias", "sigmoid", "point", "layer")
"""Fields that say how a probe is read."""
_LAYERS = tuple(name for name in MlpForm.__struct_fields__ if name != "weights")
"""Fields of a hidden layer."""


class ProbeForm(MlpForm, kw_only=True, forbid_unknown_fields=True):
    """A probe with the way in which it is read. A readout that names the probe takes all of it."""

    weights: Annotated[
        Any,
        any_of(VectorForm, list[VectorForm], PackedVector),
        msgspec.Meta(description="Weights `[H]`; `[n, H]` of a hidden layer if there are `outputs`."),
    ]
    outputs: Annotated[
        Any, any_of(VectorForm, None), msgspec.Meta(description="Weights `[n]` of the output of a hidden layer.")
    ] = None
    bias: Annotated[float | None, msgspec.Meta(description="Added to the product.")] = None
    sigmoid: Annotated[bool | None, msgspec.Meta(description="Return the sigmoid of the sum.")] = None
    point: Annotated[PointForm | None, msgspec.Meta(description="Hook point for which the probe was made.")] = None
    layer: Annotated[LayerForm | None, msgspec.Meta(description="Layer for which the probe was made.")] = None


@dataclass(frozen=True, eq=False)
class Probe:
    """A probe of a module. Fields that are None were not registered."""

    weights: Vector | MlpProbe
    """A direction, float32 ``[H]``, or a hidden layer."""
    bias: float | None = None
    sigmoid: bool | None = None
    point: PointName | None = None
    layer: int | None = None

    @classmethod
    def parse(cls, value: object, field: str) -> Probe:
        """Return the probe that a vector in any form, or a mapping of :class:`ProbeForm`'s fields, describes.

        Raises:
            SteeringError: ``value`` has another form. Its ``field`` is the path of the invalid value.
        """
        if not isinstance(value, Mapping) or PACKED_KEYS & set(value):
            return cls(parse_vector(value, field))
        names = ProbeForm.__struct_fields__
        unknown = [key for key in value if key not in names]
        if unknown:
            raise SteeringError(field, f"unknown key {shown(unknown[0])}; use {', '.join(names)}")
        given = {name: part for name, part in value.items() if part is not None}
        if "weights" not in given:
            raise SteeringError(f"{field}.weights", "is missing; a probe needs weights")
        weights: Vector | MlpProbe
        if any(name in given for name in _LAYERS) or is_matrix(given["weights"]):
            weights = MlpProbe.parse({name: given[name] for name in ("weights", *_LAYERS) if name in given}, field)
        else:
            weights = parse_vector(given["weights"], f"{field}.weights")
        sigmoid = given.get("sigmoid")
        if not isinstance(sigmoid, (bool, type(None))):
            raise SteeringError(f"{field}.sigmoid", f"must be true or false, not {shown(sigmoid)}")
        point, named = read_site(given["point"], f"{field}.point") if "point" in given else (None, None)
        layer = read_layer(given["layer"], f"{field}.layer") if "layer" in given else named
        if named not in (None, layer):
            raise SteeringError(f"{field}.layer", f"is {layer}, but the point names layer {named}; omit one of them")
        bias = read_number(given["bias"], f"{field}.bias") if "bias" in given else None
        return cls(weights, bias, sigmoid, point, layer)

    @property
    def width(self) -> int:
        """Size of the rows that the probe reads."""
        return self.weights.width if isinstance(self.weights, MlpProbe) else int(self.weights.size)

    @property
    def arrays(self) -> Iterator[Vector]:
        """All arrays; the first one of a hidden layer is ``[n, H]``."""
        yield from self.weights.arrays.values() if isinstance(self.weights, MlpProbe) else (self.weights,)

    @property
    def reading(self) -> dict[str, Any]:
        """The registered fields of :data:`READING`."""
        return {name: getattr(self, name) for name in READING if getattr(self, name) is not None}

    def to_wire(self, encode: Callable[[Vector], Any]) -> Any:
        """Return the JSON form, with the arrays that ``encode`` returns. A direction alone is its vector."""
        if isinstance(self.weights, MlpProbe):
            arrays = {name: encode(array) for name, array in self.weights.arrays.items()}
            return {**arrays, "activation": self.weights.activation, **self.reading}
        return {"weights": encode(self.weights), **self.reading} if self.reading else encode(self.weights)

    def direction(self, name: object, field: str) -> Vector:
        """Return the weights of the probe called ``name``; raise SteeringError if it has a hidden layer."""
        if isinstance(self.weights, MlpProbe):
            raise SteeringError(field, f"{name} {HAS_HIDDEN_LAYER}")
        return self.weights

    def projected(self, name: object, field: str) -> Vector:
        """Return :meth:`direction`; raise SteeringError if a product with it is not the score of the probe."""
        for part in ("bias", "sigmoid"):
            if getattr(self, part):
                problem = "which products leave out; make it the probe of a readout, or send its weights"
                raise SteeringError(field, f"{name} was registered with a {part}, {problem}")
        return self.direction(name, field)

    def check(self, name: object, given: Mapping[str, Any], field: str) -> None:
        """Raise SteeringError if a value of ``given``, by names of :data:`READING`, differs from a registered one."""
        for part, registered in self.reading.items():
            if part in given and given[part] != registered:
                raise SteeringError(
                    f"{field}.{part}",
                    f"is {shown(given[part])}, but the probe {name} was registered with {part} {shown(registered)}; "
                    f"omit {part}, or send the weights",
                )

# SPDX-License-Identifier: Apache-2.0
"""Probes of modules: weights, and the bias, sigmoid, point and layer with which they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.request.field_types import Declared, Number, any_of, read
from vllm_steer.request.hidden_layer import HAS_HIDDEN_LAYER, ActivationName, HiddenLayer
from vllm_steer.request.matrix import is_matrix
from vllm_steer.request.scalars import shown
from vllm_steer.request.sites import LayerForm, PointForm, read_layer_of, read_site
from vllm_steer.request.vector import PACKED_KEYS, PackedVector, Vector, VectorForm, pack_array, parse_vector

READING = ("bias", "sigmoid", "point", "layer")
"""Fields that say how a probe is read."""
_LAYERS = ("outputs", "biases", "activation")
"""Fields of a hidden layer."""


class Probe(Declared, frozen=True, eq=False):
    """A probe with the way in which it is read. A readout that names the probe takes all of it."""

    weights: Annotated[
        Any,
        any_of(VectorForm, list[VectorForm], PackedVector),
        msgspec.Meta(
            description="Weights `[H]`; `[n, H]` of a hidden layer if there are `outputs`.",
            extra={"missing": "; a probe needs weights"},
        ),
    ]
    """A direction, float32 ``[H]``, or a `HiddenLayer` with all of its fields, once read."""
    outputs: Annotated[
        Any, any_of(VectorForm, None), msgspec.Meta(description="Weights `[n]` of the output of a hidden layer.")
    ] = None
    biases: Annotated[
        Any, any_of(VectorForm), msgspec.Meta(description="Biases `[n]` of the hidden layer; default 0.")
    ] = None
    activation: Annotated[
        ActivationName | None,
        msgspec.Meta(description="Activation of the hidden layer, default `relu`; `gelu` is the exact form."),
    ] = None
    bias: Annotated[Number | None, msgspec.Meta(description="Added to the product.")] = None
    sigmoid: Annotated[bool | None, msgspec.Meta(description="Return the sigmoid of the sum.")] = None
    point: Annotated[
        Any, any_of(PointForm, None), msgspec.Meta(description="Hook point for which the probe was made.")
    ] = None
    layer: Annotated[Any, any_of(LayerForm, None), msgspec.Meta(description="Layer for which the probe was made.")] = (
        None
    )

    @classmethod
    def parse(cls, value: object, field: str) -> Probe:
        """Return the probe that a vector in any form, or a mapping of the fields, describes.

        Raises:
            SteeringError: ``value`` has another form. Its ``field`` is the path of the invalid value.
        """
        if not isinstance(value, Mapping) or PACKED_KEYS & set(value):
            return cls(weights=parse_vector(value, field))
        return read(cls, value, field)

    def __post_init__(self) -> None:
        """Read the arrays, the point and the layer."""
        if self.weights is None:
            raise SteeringError("weights", "is missing; a probe needs weights")
        hidden = {name: getattr(self, name) for name in _LAYERS if getattr(self, name) is not None}
        checked: dict[str, Any] = dict.fromkeys(_LAYERS)
        if hidden or is_matrix(self.weights):
            checked["weights"] = read(HiddenLayer, {"weights": self.weights, **hidden}, "")
        else:
            checked["weights"] = parse_vector(self.weights, "weights")
        checked["point"], named = (None, None) if self.point is None else read_site(self.point, "point")
        checked["layer"] = read_layer_of(named, self.layer)
        for name, value in checked.items():
            msgspec.structs.force_setattr(self, name, value)

    @property
    def width(self) -> int:
        """Size of the rows that the probe reads."""
        return self.weights.width if isinstance(self.weights, HiddenLayer) else int(self.weights.size)

    @property
    def arrays(self) -> Iterator[Vector]:
        """All arrays; the first one of a hidden layer is ``[n, H]``."""
        yield from self.weights.arrays.values() if isinstance(self.weights, HiddenLayer) else (self.weights,)

    @property
    def reading(self) -> dict[str, Any]:
        """The registered fields of :data:`READING`."""
        return {name: getattr(self, name) for name in READING if getattr(self, name) is not None}

    def to_wire(self, encode: Callable[[Vector], Any] = pack_array) -> Any:
        """Return the JSON form, with the arrays that ``encode`` returns. A direction alone is its vector."""
        if isinstance(self.weights, HiddenLayer):
            arrays = {name: encode(array) for name, array in self.weights.arrays.items()}
            return {**arrays, "activation": self.weights.activation, **self.reading}
        return {"weights": encode(self.weights), **self.reading} if self.reading else encode(self.weights)

    def direction(self, name: object, field: str) -> Vector:
        """Return the weights of the probe called ``name``; raise SteeringError if it has a hidden layer."""
        if isinstance(self.weights, HiddenLayer):
            raise SteeringError(field, f"{name} {HAS_HIDDEN_LAYER}")
        direction: Vector = self.weights
        return direction

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

# SPDX-License-Identifier: Apache-2.0
"""Probes: weights, and the bias, sigmoid, point and layer with which those of modules are read.

A probe with one hidden layer is ``outputs . activation(weights x + biases) + bias``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_PROBE_WIDTH
from vllm_steer.request.field_types import Declared, Number, any_of, read
from vllm_steer.request.matrix import is_matrix
from vllm_steer.request.projection import Projection
from vllm_steer.request.scalars import shown
from vllm_steer.request.sites import LayerForm, PointForm, read_layer_of, read_site
from vllm_steer.request.vector import PACKED_KEYS, PackedVector, Vector, VectorForm, pack_array, parse_vector

ActivationName = Literal["relu", "gelu", "tanh", "silu"]
ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)
ARRAYS = ("weights", "outputs", "biases")
"""Fields of a probe with a hidden layer that are arrays."""

TOO_LATE = (
    "a probe with a hidden layer is computed after the forward pass, too late for an edit of the same token; "
    'use the window "previous", "latch" or "prompt"'
)
NO_COSINE = "cannot be combined with a hidden layer; omit it"
HAS_HIDDEN_LAYER = "has a hidden layer and is not a direction; it can only be the probe of a readout"
_REQUIRED = msgspec.Meta(extra={"missing": "; a probe with a hidden layer needs it"})


class HiddenLayer(Declared, frozen=True):
    """A probe with one hidden layer: `outputs . activation(weights x + biases) + bias`."""

    weights: Annotated[
        Any,
        _REQUIRED,
        any_of(list[VectorForm], PackedVector),
        msgspec.Meta(description=f"Matrix `[n, H]` of the hidden layer; n is at most {MAX_PROBE_WIDTH}."),
    ]
    """A `Projection` ``[n, H]`` once read."""
    outputs: Annotated[Any, _REQUIRED, any_of(VectorForm), msgspec.Meta(description="Weights `[n]` of the output.")]
    """The bytes of float32 ``[n]`` once read."""
    biases: Annotated[
        Any, any_of(VectorForm), msgspec.Meta(description="Biases `[n]` of the hidden layer; default 0.")
    ] = None
    """As ``outputs``."""
    activation: Annotated[
        ActivationName, msgspec.Meta(description="Activation of the hidden layer; `gelu` is the exact form.")
    ] = "relu"

    def __post_init__(self) -> None:
        """Read the arrays; raise SteeringError if numbers are not finite, or sizes differ."""
        weights = Projection(self.weights, "weights")
        width = len(weights.directions)
        if width > MAX_PROBE_WIDTH:
            raise SteeringError("weights", f"has {width} hidden units; at most {MAX_PROBE_WIDTH} are allowed")
        msgspec.structs.force_setattr(self, "weights", weights)
        for name in ("biases", "outputs"):
            given = getattr(self, name)
            numbers = parse_vector(np.zeros(width) if given is None and name == "biases" else given, name)
            if numbers.size != width:
                problem = f"has {numbers.size} numbers, but weights has {width} rows; give one for each"
                raise SteeringError(name, problem)
            msgspec.structs.force_setattr(self, name, numbers.astype("<f4", copy=False).tobytes())

    @property
    def arrays(self) -> dict[str, Vector]:
        """The float32 arrays by the names of the fields: ``weights`` ``[n, H]``, the others ``[n]``."""
        biases, outputs = (np.frombuffer(numbers, "<f4") for numbers in (self.biases, self.outputs))
        return {"weights": self.weights.directions, "biases": biases, "outputs": outputs}

    @property
    def width(self) -> int:
        """Size of each row of the weights."""
        return int(self.weights.directions.shape[1])


def has_hidden_layer(value: object) -> bool:
    """Return whether the value of ``probe`` is a probe with a hidden layer."""
    return isinstance(value, Mapping) and any(name in value for name in ("weights", "outputs", "activation"))


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

# SPDX-License-Identifier: Apache-2.0
"""Probes with one hidden layer: ``outputs . activation(weights x + biases) + bias``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_PROBE_WIDTH
from vllm_steer.request.field_types import Declared, any_of
from vllm_steer.request.projection import Projection
from vllm_steer.request.vector import PackedVector, Vector, VectorForm, parse_vector

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

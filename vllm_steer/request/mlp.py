# SPDX-License-Identifier: Apache-2.0
"""Probes with one hidden layer: ``outputs . activation(weights x + biases) + bias``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_PROBE_WIDTH
from vllm_steer.request.declared import any_of
from vllm_steer.request.projection import Projection
from vllm_steer.request.scalars import read_choice, shown
from vllm_steer.request.vector import PackedVector, Vector, VectorForm, parse_vector

ActivationName = Literal["relu", "gelu", "tanh", "silu"]
ARRAYS = ("weights", "outputs", "biases")
"""Fields of a probe with a hidden layer that are arrays."""
ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)

TOO_LATE = (
    "a probe with a hidden layer is computed after the forward pass, too late for an edit of the same token; "
    'use the window "previous", "latch" or "prompt"'
)
NO_COSINE = "cannot be combined with a hidden layer; omit it"
HAS_HIDDEN_LAYER = "has a hidden layer and is not a direction; it can only be the probe of a readout"


class MlpForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A probe with one hidden layer: `outputs . activation(weights x + biases) + bias`."""

    weights: Annotated[
        Any,
        any_of(list[VectorForm], PackedVector),
        msgspec.Meta(description=f"Matrix `[n, H]` of the hidden layer; n is at most {MAX_PROBE_WIDTH}."),
    ]
    outputs: Annotated[Any, any_of(VectorForm), msgspec.Meta(description="Weights `[n]` of the output.")]
    biases: Annotated[
        Any, any_of(VectorForm), msgspec.Meta(description="Biases `[n]` of the hidden layer; default 0.")
    ] = None
    activation: Annotated[
        ActivationName, msgspec.Meta(description="Activation of the hidden layer; `gelu` is the exact form.")
    ] = "relu"


@dataclass(frozen=True)
class MlpProbe:
    """A checked probe with one hidden layer."""

    weights: Projection
    """``[n, H]``."""
    biases: bytes
    """float32 ``[n]``."""
    outputs: bytes
    """float32 ``[n]``."""
    activation: ActivationName

    @property
    def arrays(self) -> dict[str, Vector]:
        """The float32 arrays by the names of :class:`MlpForm`'s fields: ``weights`` ``[n, H]``, the others ``[n]``."""
        biases, outputs = (np.frombuffer(numbers, "<f4") for numbers in (self.biases, self.outputs))
        return {"weights": self.weights.directions, "biases": biases, "outputs": outputs}

    @property
    def width(self) -> int:
        """Size of each row of the weights."""
        return int(self.weights.directions.shape[1])

    @classmethod
    def parse(cls, value: Mapping[str, Any], field: str) -> MlpProbe:
        """Return the probe that a mapping of :class:`MlpForm`'s fields describes.

        Raises:
            SteeringError: A key is unknown, a value is missing or not finite, or sizes differ.
        """
        names = MlpForm.__struct_fields__
        unknown = [key for key in value if key not in names]
        if unknown:
            raise SteeringError(field, f"unknown key {shown(unknown[0])}; use {', '.join(names)}")
        for name in ("weights", "outputs"):
            if value.get(name) is None:
                raise SteeringError(f"{field}.{name}", "is missing; a probe with a hidden layer needs it")
        weights = Projection(value["weights"], f"{field}.weights")
        width = len(weights.directions)
        if width > MAX_PROBE_WIDTH:
            raise SteeringError(f"{field}.weights", f"has {width} hidden units; at most {MAX_PROBE_WIDTH} are allowed")
        biases = np.zeros(width) if value.get("biases") is None else value["biases"]
        return cls(
            weights,
            _numbers(biases, width, f"{field}.biases"),
            _numbers(value["outputs"], width, f"{field}.outputs"),
            read_choice(value.get("activation", "relu"), ACTIVATIONS, f"{field}.activation"),
        )


def is_mlp(value: object) -> bool:
    """Return whether the value of ``probe`` is a probe with a hidden layer."""
    return isinstance(value, Mapping) and any(name in value for name in ("weights", "outputs", "activation"))


def _numbers(value: Any, width: int, field: str) -> bytes:
    numbers: npt.NDArray[np.float32] = parse_vector(value, field)
    if numbers.size != width:
        raise SteeringError(field, f"has {numbers.size} numbers, but weights has {width} rows; give one for each")
    return numbers.astype("<f4", copy=False).tobytes()

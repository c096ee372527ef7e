# SPDX-License-Identifier: Apache-2.0
"""Encoders of sparse autoencoders as heads of readouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.taps.heads import Activation

FloatArray = npt.NDArray[np.float32]
ActivationName = Literal["relu", "jumprelu", "topk", "gated"]


@dataclass(frozen=True, eq=False)
class SparseEncoder:
    """An encoder: ``activation((row - subtracted) @ weights + bias)``."""

    activation: ActivationName
    weights: FloatArray
    """``[hidden, features]``."""
    bias: FloatArray
    """``[features]``; of a gated encoder, the bias of the gate."""
    subtracted: FloatArray | None = None
    """``[hidden]``, subtracted from each row."""
    threshold: FloatArray | None = None
    """``[features]`` of JumpReLU: smaller values are 0."""
    k: int = 0
    """Number of features that TopK keeps."""
    scale: FloatArray | None = None
    """``[features]`` of a gated encoder: factor of its magnitudes."""
    magnitude_bias: FloatArray | None = None
    """``[features]`` of a gated encoder."""


class SparseEncoderHead:
    """Features of a sparse autoencoder.

    On CUDA, rows in bfloat16 are multiplied on tensor cores. Weights are then stored as sums of two bfloat16 numbers,
    which differ from the float32 numbers by less than 2^-17 of them, and products are accumulated in float32. What is
    subtracted from rows is part of the bias.

    Args:
        encoder: The encoder.
        device: Device of the rows.
        dtype: The model's dtype.
    """

    collective = False

    def __init__(
        self, encoder: SparseEncoder, device: torch.device, dtype: torch.dtype, *, split: bool | None = None
    ) -> None:
        def on_device(array: FloatArray | None) -> torch.Tensor | None:
            return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._kept = encoder.k if encoder.activation == "topk" else 0
        weights = torch.from_numpy(np.ascontiguousarray(encoder.weights)).to(device)
        self._bias = torch.from_numpy(np.ascontiguousarray(encoder.bias)).to(device)
        self._subtracted, self._threshold = on_device(encoder.subtracted), on_device(encoder.threshold)
        self._scale, self._magnitude_bias = on_device(encoder.scale), on_device(encoder.magnitude_bias)
        self.num_outputs = int(weights.shape[1])
        self._split = device.type == "cuda" and dtype == torch.bfloat16 if split is None else split
        self._weights = _split(weights) if self._split else weights
        if self._split and self._subtracted is not None:
            self._move_to_bias(self._subtracted)
            self._subtracted = None

    def _move_to_bias(self, subtracted: torch.Tensor) -> None:
        """Subtract the products of ``subtracted`` from the biases instead."""
        parts = self._weights.view(-1, len(subtracted), self.num_outputs)
        moved = [sum(subtracted.double() @ part.double() for part in each) for each in parts.split(1024, dim=2)]
        shift = torch.cat([torch.as_tensor(each) for each in moved])
        self._bias = (self._bias.double() - shift).float()
        if self._scale is not None and self._magnitude_bias is not None:
            self._magnitude_bias = (self._magnitude_bias.double() - self._scale.double() * shift).float()

    @property
    def activation(self) -> Activation:
        """Biases, thresholds and the number of activations that remain."""
        return Activation(self._bias, self._threshold, self._scale, self._magnitude_bias, self._kept)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The encoder's weights on the device."""
        return tuple(each for each in vars(self).values() if isinstance(each, torch.Tensor))

    @property
    def num_bytes(self) -> int:
        """Size on the device."""
        return sum(each.nbytes for each in self.tensors)

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the products of the rows with the weights, float32."""
        if self._split:
            repeated = rows.repeat(1, len(self._weights) // rows.shape[1])
            if rows.device.type == "cuda":
                return torch.mm(repeated, self._weights, out_dtype=torch.float32)
            return repeated.float() @ self._weights.float()
        x = rows.float()
        if self._subtracted is not None:
            x = x - self._subtracted
        return x @ self._weights


def _split(weights: torch.Tensor) -> torch.Tensor:
    """Return the weights as one or two bfloat16 matrices on top of each other, whose sum they are."""
    high = weights.bfloat16()
    low = (weights - high.float()).bfloat16()
    return torch.cat([high, low]) if low.any() else high

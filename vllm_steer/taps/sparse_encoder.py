# SPDX-License-Identifier: Apache-2.0
"""Encoders of sparse autoencoders as heads of readouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float32]
Activation = Literal["relu", "jumprelu", "topk", "gated"]


@dataclass(frozen=True, eq=False)
class SparseEncoder:
    """An encoder: ``activation((row - subtracted) @ weights + bias)``."""

    activation: Activation
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

    Args:
        encoder: The encoder.
        device: Device of the rows.
    """

    collective = False

    def __init__(self, encoder: SparseEncoder, device: torch.device) -> None:
        def on_device(array: npt.NDArray[np.float32] | None) -> torch.Tensor | None:
            return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._activation, self._k = encoder.activation, encoder.k
        self._weights = torch.from_numpy(np.ascontiguousarray(encoder.weights)).to(device)
        self._bias = torch.from_numpy(np.ascontiguousarray(encoder.bias)).to(device)
        self._subtracted, self._threshold = on_device(encoder.subtracted), on_device(encoder.threshold)
        self._scale, self._magnitude_bias = on_device(encoder.scale), on_device(encoder.magnitude_bias)
        self.num_outputs = int(self._weights.shape[1])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The encoder's weights on the device."""
        return tuple(each for each in vars(self).values() if isinstance(each, torch.Tensor))

    @property
    def num_bytes(self) -> int:
        """Size on the device."""
        return sum(each.nbytes for each in self.tensors)

    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the activations. TopK keeps its ``k`` largest only where the readout can show more of them."""
        x = rows.float()
        if self._subtracted is not None:
            x = x - self._subtracted
        products = x @ self._weights
        if self._scale is not None and self._magnitude_bias is not None:
            magnitude = torch.relu(products * self._scale + self._magnitude_bias)
            return torch.where(products + self._bias > 0, magnitude, 0.0)
        before = products.add_(self._bias)
        if self._threshold is not None:
            return torch.where(before > self._threshold, torch.relu(before), 0.0)
        return torch.relu_(before)

    def values(self, largest: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Return the activations, without those beyond a TopK encoder's ``k``."""
        if self._activation == "topk" and largest.shape[-1] > self._k:
            largest = largest.clone()
            largest[:, self._k :] = 0.0
        return largest

    def indices(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the features, -1 for those that are not active."""
        return torch.where(values > 0, indices, -1)

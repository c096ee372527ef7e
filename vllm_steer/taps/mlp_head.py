# SPDX-License-Identifier: Apache-2.0
"""Probes with one hidden layer, computed from rows of the arena after the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.nn import functional

from vllm_steer.taps.tables import upload

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "silu": functional.silu,
}


class MlpHead:
    """A probe ``outputs . activation(weights x + biases) + bias``, in float32.

    Args:
        weights: ``[n, hidden]`` on the device.
        biases: float32 ``[n]``.
        outputs: float32 ``[n]``.
        bias: Added to the output.
        activation: Name of the activation.
        sigmoid: Whether to return the sigmoid.
    """

    def __init__(
        self, weights: torch.Tensor, biases: bytes, outputs: bytes, bias: float, activation: str, *, sigmoid: bool
    ) -> None:
        self._weights = weights
        self._biases, self._outputs = (_on_device(numbers, weights.device) for numbers in (biases, outputs))
        self._bias, self._activate, self._sigmoid = bias, ACTIVATIONS[activation], sigmoid

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the probe's value of each row, ``[rows, 1]``."""
        hidden = self._activate(torch.addmm(self._biases, rows.float(), self._weights.T))
        value = hidden @ self._outputs.unsqueeze(1) + self._bias
        return torch.sigmoid(value) if self._sigmoid else value


def _on_device(numbers: bytes, device: torch.device) -> torch.Tensor:
    return upload(torch.from_numpy(np.frombuffer(numbers, "<f4").copy()), device)

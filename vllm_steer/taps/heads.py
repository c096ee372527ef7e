# SPDX-License-Identifier: Apache-2.0
"""Heads: functions of rows of the stream with many outputs, of which a readout records the largest.

Rows are handled in parts, so that the outputs of a step take a bounded amount of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

OUTPUT_BYTES = 64 << 20
"""Most bytes of float32 outputs that a head holds at one time, for at least one row."""


class Head(Protocol):
    """A function of rows of the stream."""

    collective: bool
    """Whether all tensor-parallel ranks have to call it."""
    num_outputs: int

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors on the device that belong to the head and not to the model."""

    @property
    def num_bytes(self) -> int:
        """Size of :attr:`tensors`."""

    def outputs(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return float32 ``[rows, outputs]`` for rows of the stream in the model's dtype; None on other ranks."""

    def values(self, largest: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Return the recorded values of the ``largest`` of the ``outputs``."""

    def indices(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the recorded indices of ``values``."""


class LensHead:
    """The model's final norm and unembedding: log-probabilities of tokens.

    Args:
        norm: The model's final norm.
        compute_logits: The model's own function from normed rows to logits. All tensor-parallel ranks call it, and the
            first one gets the logits.
        vocab_size: Number of logits.
    """

    collective = True
    tensors = ()
    num_bytes = 0

    def __init__(
        self,
        norm: Callable[[torch.Tensor], torch.Tensor],
        compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
        vocab_size: int,
    ) -> None:
        self.norm = norm
        self._compute_logits = compute_logits
        self.num_outputs = vocab_size

    def outputs(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the logits."""
        logits = self._compute_logits(self.norm(rows))
        return None if logits is None else logits.float()

    def values(self, largest: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities."""
        return largest - torch.logsumexp(outputs, dim=-1, keepdim=True)

    def indices(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return token ids."""
        return indices


def largest_outputs(head: Head, rows: torch.Tensor, k: int) -> torch.Tensor | None:
    """Return indices and values of the ``k`` largest outputs of a head, float32 ``[rows, 2 k]``; None on other ranks.

    Args:
        head: The head.
        rows: ``[rows, hidden]`` of the stream, in the model's dtype.
        k: Number of outputs, largest first.
    """
    size = max(1, OUTPUT_BYTES // (4 * head.num_outputs))
    found: list[torch.Tensor] = []
    for part in rows.split(size):
        outputs = head.outputs(part)
        if outputs is not None:
            largest, indices = torch.topk(outputs, k, dim=-1)
            values = head.values(largest, outputs)
            found.append(torch.cat([head.indices(indices, values).float(), values], dim=-1))
    return torch.cat(found) if found else None

# SPDX-License-Identifier: Apache-2.0
"""Heads: functions of rows of the stream with many outputs, of which a readout records the largest.

A head is a matrix product, :meth:`Head.products`, and what is done with its elements. This module is the definition of
the second part. On CUDA, :mod:`vllm_steer.taps.top_k_kernel` replaces :func:`record_top_k`.

Rows are handled in parts, so that the products of a step take a bounded amount of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

OUTPUT_BYTES = 128 << 20
"""Most bytes of products that a head holds at one time, for at least one row. Each part reads all weights, so it is
enough for 256 rows of a large vocabulary in 16 bits."""


@dataclass(frozen=True, eq=False)
class Activation:
    """Activations of features by their products: tensors are ``[outputs]`` float32."""

    bias: torch.Tensor
    threshold: torch.Tensor | None = None
    """Smaller values are 0."""
    scale: torch.Tensor | None = None
    """Factor of a gated encoder's magnitudes. ``bias`` is then the bias of its gate."""
    magnitude_bias: torch.Tensor | None = None
    kept: int = 0
    """Number of largest activations that are not 0; 0 for all."""

    def of(self, products: torch.Tensor) -> torch.Tensor:
        """Return the activations of float32 products, without the limit :attr:`kept`."""
        if self.scale is not None and self.magnitude_bias is not None:
            magnitude = torch.relu(products * self.scale + self.magnitude_bias)
            return torch.where(products + self.bias > 0, magnitude, 0.0)
        before = products + self.bias
        if self.threshold is not None:
            return torch.where(before > self.threshold, torch.relu(before), 0.0)
        return torch.relu(before)


class Head(Protocol):
    """A function of rows of the stream."""

    collective: bool
    """Whether all tensor-parallel ranks have to call it."""
    num_outputs: int

    @property
    def activation(self) -> Activation | None:
        """Function applied to the products; None for logits, of which log-probabilities are recorded."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors on the device that belong to the head and not to the model."""

    @property
    def num_bytes(self) -> int:
        """Size of :attr:`tensors`."""

    def products(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return ``[rows, outputs]`` for rows of the stream in the model's dtype; None on other ranks."""


class LensHead:
    """The model's final norm and unembedding: log-probabilities of tokens.

    Args:
        norm: The model's final norm.
        compute_logits: The model's own function from normed rows to logits. All tensor-parallel ranks call it, and the
            first one gets the logits.
        vocab_size: Number of logits.
    """

    collective = True
    activation = None
    tensors = ()
    num_bytes = 0

    def __init__(
        self,
        norm: Callable[[torch.Tensor], torch.Tensor],
        compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
        vocab_size: int,
    ) -> None:
        self.norm = norm
        self.compute_logits = compute_logits
        self.num_outputs = vocab_size

    def products(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the logits, in the dtype that the model returns."""
        return self.compute_logits(self.norm(rows))


@dataclass(frozen=True)
class Places:
    """Places in which the readouts of some rows are recorded.

    Attributes:
        token: ``[rows]`` int64, the token of each row.
        column: ``[rows]`` int64, the first column in the token's record.
        kept: ``[rows]`` bool, rows whose record keeps its values.
    """

    token: torch.Tensor
    column: torch.Tensor
    kept: torch.Tensor

    def part(self, first: int, stop: int) -> Places:
        """Return the places of some of the rows."""
        return Places(self.token[first:stop], self.column[first:stop], self.kept[first:stop])

    def write(self, record: torch.Tensor, values: torch.Tensor) -> None:
        """Write values ``[rows, n]`` to the columns of the records."""
        token = self.token.unsqueeze(1)
        columns = self.column.unsqueeze(1) + torch.arange(values.shape[1], device=values.device)
        record[token, columns] = torch.where(self.kept.unsqueeze(1), record[token, columns], values)


def top_k_outputs(products: torch.Tensor, activation: Activation | None, k: int) -> torch.Tensor:
    """Return indices and values of the ``k`` largest outputs of a head, float32 ``[rows, 2 k]``.

    Of log-probabilities these are token ids. Of activations these are features, -1 for those that are not active.

    Args:
        products: ``[rows, outputs]``.
        activation: The head's activation, None for log-probabilities.
        k: Number of outputs, largest first.
    """
    products = products.float()
    outputs = products if activation is None else activation.of(products)
    values, indices = torch.topk(outputs, k, dim=-1)
    if activation is None:
        values = values - torch.logsumexp(outputs, dim=-1, keepdim=True)
    else:
        if 0 < activation.kept < k:
            values = values.clone()
            values[:, activation.kept :] = 0.0
        indices = torch.where(values > 0, indices, -1)
    return torch.cat([indices.float(), values], dim=-1)


def chosen_outputs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return ids and log-probabilities of tokens ``[k]`` as :func:`top_k_outputs` does, float32 ``[rows, 2 k]``."""
    logits = logits.float()
    values = logits[:, tokens] - torch.logsumexp(logits, dim=-1, keepdim=True)
    return torch.cat([tokens.float().expand_as(values), values], dim=-1)


def record_top_k(
    record: torch.Tensor, places: Places, products: torch.Tensor, activation: Activation | None, k: int
) -> None:
    """Write the result of :func:`top_k_outputs` to the records of the rows, ``[tokens, columns]`` float32."""
    places.write(record, top_k_outputs(products, activation, k))


def parts(head: Head, rows: int, itemsize: int) -> list[tuple[int, int]]:
    """Return the first and last rows of the parts in which a head handles ``rows`` rows."""
    size = max(1, OUTPUT_BYTES // (itemsize * head.num_outputs))
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]

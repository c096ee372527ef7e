# SPDX-License-Identifier: Apache-2.0
"""Heads of readouts against their definition."""

from __future__ import annotations

import pytest
import torch

from vllm_steer.taps import heads
from vllm_steer.taps.heads import LensHead, largest_outputs

HIDDEN, VOCAB, ROWS, K = 8, 40, 7, 5


@pytest.mark.parametrize("rows_at_once", [1, 3, ROWS])
def test_lens_equals_log_softmax(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches values that are not normalized, rows in another order, and a part that is lost at the memory bound."""
    monkeypatch.setattr(heads, "OUTPUT_BYTES", 4 * VOCAB * rows_at_once)
    generator = torch.Generator().manual_seed(1)
    rows, unembedding = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    sizes: list[int] = []

    def logits(normed: torch.Tensor) -> torch.Tensor:
        sizes.append(len(normed))
        return normed @ unembedding.T

    found = largest_outputs(LensHead(lambda x: 2 * x, logits, VOCAB), rows, K)
    expected = (2 * rows @ unembedding.T).log_softmax(-1).topk(K)
    assert found is not None
    assert found[:, :K].long().equal(expected.indices)
    torch.testing.assert_close(found[:, K:], expected.values)
    assert max(sizes) == rows_at_once


def test_other_ranks_get_nothing() -> None:
    """Catches values made up on tensor-parallel ranks that have no logits."""
    assert largest_outputs(LensHead(lambda x: x, lambda x: None, VOCAB), torch.zeros(2, HIDDEN), K) is None

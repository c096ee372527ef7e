# SPDX-License-Identifier: Apache-2.0
"""Products of captured rows with directions, against the definition."""

from __future__ import annotations

import pytest
import torch

from vllm_steer.engine import collect


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k", "hidden"), [(1, 1, 64), (5, 3, 96), (7, 2, 45), (300, 4, 256), (0, 3, 64)])
def test_products_are_those_of_the_definition(
    n: int, k: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches pieces of ``hidden`` left out or paired with others, a width that does not divide, rounding to the rows'
    dtype, and parts of many rows in another order; in pieces and in one."""
    rows, directions = torch.randn(n, hidden).to(dtype), torch.randn(k, hidden)
    right = rows.double() @ directions.double().T
    for few, most in ((1 << 18, 4096), (-1, 4096), (1 << 18, 4)):
        monkeypatch.setattr(collect, "_FEW_RESULTS", few)
        monkeypatch.setattr(collect, "_MOST_ROWS", most)
        found = collect.products(rows, directions)
        assert (found.shape, found.dtype) == ((n, k), torch.float32)
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)

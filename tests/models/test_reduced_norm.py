# SPDX-License-Identifier: Apache-2.0
"""Taps at norms that also reduce, on a norm of one line and kernels that do or do not call it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_steer.models.reduced_norm import TappedNorm, reduce_and_norm


class Norm(nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return 2 * x
        return 2 * (x + residual), x + residual


def kernel(hidden: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the norm of the sum over three ranks without the norm's ``forward``."""
    stream = 3 * hidden + residual
    return 2 * stream, stream


def steps(hidden: torch.Tensor, residual: torch.Tensor, norm: Norm) -> Any:
    return norm(3 * hidden, residual)


@pytest.mark.parametrize("function", [kernel, steps])
@pytest.mark.parametrize("active", [True, False])
def test_edits_once_in_front_of_the_norm(function: Any, active: bool) -> None:
    """Catches an edit that the norm misses, one that runs twice, one of a partial sum, and work in idle steps."""
    norm, seen = Norm(), []

    def stream(residual: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        if active:
            seen.append(residual + (0 if hidden is None else hidden))
            residual += 10

    tap: Any = SimpleNamespace(is_active=lambda: active)
    read: list[torch.Tensor] = []
    TappedNorm(norm, stream, [tap], read.append)  # type: ignore[arg-type]
    out, after = reduce_and_norm(function, torch.ones(2), torch.ones(2), norm)
    change = 10 if active else 0
    assert torch.equal(after, torch.full((2,), 4.0 + change))
    assert torch.equal(out, 2 * after)
    assert [each.tolist() for each in seen] == ([[4.0, 4.0]] if active else [])
    assert [each.tolist() for each in read] == [out.tolist()]


def test_leaves_other_norms_alone() -> None:
    """Catches an edit in a drafter, which calls the same function with norms of its own."""
    out, stream = reduce_and_norm(kernel, torch.ones(2), torch.ones(2), Norm())
    assert (out.tolist(), stream.tolist()) == ([8.0, 8.0], [4.0, 4.0])


def test_the_first_norm_has_no_branch() -> None:
    """Catches a tap of the first layer that runs a second time at its norm."""
    norm = Norm()
    TappedNorm(norm, lambda *summands: pytest.fail("tapped twice"), [])
    assert norm(torch.ones(2)).tolist() == [2.0, 2.0]

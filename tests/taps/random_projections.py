# SPDX-License-Identifier: Apache-2.0
"""Random rows and directions, to compare projections with their definition."""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_ERROR = 1e-6
"""Relative to the sum of a product's absolute terms. The error of float32 is smaller, that of TF32 larger."""
SIZES = ((1, 1, 64), (5, 3, 80), (70, 17, 600), (33, 16, 256), (200, 33, 96))
"""Rows, directions and width: below and above the block sizes, and not divisible by them."""
Launch = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]


def max_error(launch: Launch, size: tuple[int, int, int], picked: bool, device: torch.device) -> float:
    """Return the largest error of a product, as :func:`relative_error` defines it.

    With ``picked``, the launch gets indices of some rows in random order; all other rows are NaN and must not be read.
    """
    n, k, hidden = size
    generator = torch.Generator().manual_seed(n * 1000 + k)
    # All magnitudes, including those that become infinite when rounded up to bfloat16.
    directions = torch.randn(k, hidden, generator=generator) * 10.0 ** torch.linspace(-30, 38.5, k)[:, None]
    directions = directions.clamp(-3.4028e38, 3.4028e38)
    rows = (torch.randn(n, hidden, generator=generator) * 1e-3).bfloat16()
    stored, places = rows, None
    if picked:
        stored = torch.full((3 * n, hidden), torch.nan, dtype=torch.bfloat16)
        places = torch.randperm(3 * n, generator=generator)[:n]
        stored[places] = rows
        places = places.to(device)
    found = launch(stored.to(device), places, directions.to(device)).cpu()
    if found.shape != (n, k) or found.dtype != torch.float32:
        raise AssertionError(f"{found.shape} {found.dtype}")
    return relative_error(found, rows, directions)


def relative_error(found: torch.Tensor, rows: torch.Tensor, directions: torch.Tensor) -> float:
    """Return the largest error relative to the sum of a product's absolute terms; infinity if any result is NaN."""
    expected, terms = rows.double() @ directions.double().T, rows.double().abs() @ directions.double().abs().T
    return float(((found - expected).abs() / terms).nan_to_num(nan=torch.inf).max())

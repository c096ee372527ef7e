# SPDX-License-Identifier: Apache-2.0
"""Definition of projections: products of captured rows with directions, sent to the host instead of the rows."""

from __future__ import annotations

import math

import torch

_PIECES, _FEW_RESULTS, _MOST_ROWS = 16, 1 << 18, 4096


def products(rows: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Return the products of rows with directions, computed in float32.

    A small product is computed in pieces of ``hidden`` that are summed, since a single matrix product would occupy few
    of the GPU's processors for a long time. Many rows are converted to float32 in parts, since vLLM leaves little
    memory.

    Args:
        rows: ``[n, hidden]``.
        directions: ``[k, hidden]`` float32.

    Returns:
        ``[n, k]`` float32.
    """
    if len(rows) > _MOST_ROWS:
        return torch.cat([products(part, directions) for part in rows.split(_MOST_ROWS)])
    n, k, hidden = len(rows), len(directions), rows.shape[1]
    if n * k > _FEW_RESULTS:
        return rows.float() @ directions.T
    pieces = math.gcd(hidden, _PIECES)
    left = rows.float().view(n, pieces, hidden // pieces).transpose(0, 1)
    return torch.bmm(left, directions.view(k, pieces, hidden // pieces).permute(1, 2, 0)).sum(0)


def products_at(stored: torch.Tensor, places: torch.Tensor | None, directions: torch.Tensor) -> torch.Tensor:
    """Return :func:`products` of the rows of ``stored`` at ``places``, ``[n]`` int64, or of all rows if None."""
    return products(stored if places is None else stored.index_select(0, places), directions)

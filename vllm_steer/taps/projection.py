# SPDX-License-Identifier: Apache-2.0
"""Products of captured rows with directions, which leave the GPU in the place of the rows: the definition."""

from __future__ import annotations

import math

import torch

_PIECES, _FEW_RESULTS, _MOST_ROWS = 16, 1 << 18, 4096


def products(rows: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """``rows`` ``[n, hidden]`` times ``directions`` ``[k, hidden]`` float32: ``[n, k]`` float32.

    Both in float32, as the front end has it for what it projects itself. A product with few results is taken in pieces
    of ``hidden``, which are added up: by itself it would keep a few of the GPU's processors busy for long, and its step
    waits for it. Many rows are made float32 a part at a time: vLLM has left no memory for all.
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
    """Those of the rows at ``places`` ``[n]`` int64 of ``stored``, None for all."""
    return products(stored if places is None else stored.index_select(0, places), directions)

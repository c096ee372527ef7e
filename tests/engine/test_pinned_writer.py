# SPDX-License-Identifier: Apache-2.0
"""Values on their way to a device table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer.engine.pinned_writer import PinnedTableWriter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "dtype", "values"),
    [
        (
            (3,),
            torch.float32,
            [np.array([1.5, -2.0, 1e-30], "<f4"), np.zeros(3, "<f4"), np.array([3.0, 4.0, 5.0], "<f4")],
        ),
        ((2,), torch.int32, [(1, 2**31 - 1), (-5, 0), (7, 8)]),
        ((2,), torch.float32, [(0.1, -(2.0**100)), (0.5, 0.25), (1.0, 2.0)]),
        ((), torch.int32, [9, 0, 2**31 - 1]),
    ],
    ids=["vectors", "instructions", "parameters", "numbers"],
)
def test_values_come_to_their_places(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, values: list[Any]
) -> None:
    """Catches values that are swapped, rounded or written elsewhere, one for a place that has had a later one, and a
    table that is written to before its step."""
    table = torch.full((6, *shape), 77, dtype=dtype, device=device)
    staged = PinnedTableWriter(table)
    staged.put(4, values[1])
    staged.put(1, values[0])
    staged.put(4, values[2])
    staged.put(0, values[1])
    assert (table == 77).all()
    staged.flush()
    right = torch.full((6, *shape), 77, dtype=dtype)
    for place, value in ((1, values[0]), (4, values[2]), (0, values[1])):
        right[place] = torch.tensor(np.array(value), dtype=dtype)
    assert torch.equal(table.cpu(), right)
    table.fill_(0)
    staged.flush()
    assert not table.any()

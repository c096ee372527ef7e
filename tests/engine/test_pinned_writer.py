# SPDX-License-Identifier: Apache-2.0
"""Batched writes to device tables through pinned memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer.engine.pinned_writer import PinnedTableWriter, flush_writers

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
def test_writes_rows_at_flush(device: str, shape: tuple[int, ...], dtype: torch.dtype, values: list[Any]) -> None:
    """Catches swapped or rounded values, wrong rows, an overwritten value that wins, and writes before the flush."""
    table = torch.full((6, *shape), 77, dtype=dtype, device=device)
    writer = PinnedTableWriter(table)
    writer.put(4, values[1])
    writer.put(1, values[0])
    writer.put(4, values[2])
    writer.put(0, values[1])
    assert (table == 77).all()
    flush_writers([writer])
    expected = torch.full((6, *shape), 77, dtype=dtype)
    for row, value in ((1, values[0]), (4, values[2]), (0, values[1])):
        expected[row] = torch.tensor(np.array(value), dtype=dtype)
    assert torch.equal(table.cpu(), expected)
    table.fill_(0)
    flush_writers([writer])
    assert not table.any()


@pytest.mark.parametrize("row", [-1, 6])
def test_rows_outside_the_table(row: int) -> None:
    """Catches a row that the kernel would write into the memory beside the table."""
    writer = PinnedTableWriter(torch.zeros(6, 3))
    with pytest.raises(IndexError, match=f"row {row} is outside the table of 6 rows"):
        writer.put(row, np.zeros(3, "<f4"))
    assert not writer.values


@pytest.mark.parametrize("device", DEVICES)
def test_writes_all_tables(device: str) -> None:
    """Catches values of one table in another, and a row of odd length that shifts the parts behind it."""
    shapes = {(3,): torch.int32, (): torch.float32, (5,): torch.float32, (2, 2): torch.int64, (1,): torch.int32}
    tables = [torch.zeros(7, *shape, dtype=dtype, device=device) for shape, dtype in shapes.items()]
    writers = [PinnedTableWriter(table) for table in tables]
    expected = [table.clone() for table in tables]
    for number, (writer, wanted) in enumerate(zip(writers, expected, strict=True)):
        for row in range(number + 1, 7) if number != 2 else ():
            value = np.full(wanted.shape[1:], 100 * number + row).tolist()
            writer.put(row, value)
            wanted[row] = torch.tensor(value)
    flush_writers(writers)
    for table, wanted in zip(tables, expected, strict=True):
        assert torch.equal(table, wanted)

# SPDX-License-Identifier: Apache-2.0
"""Random writes to rows of tables, by the kernel and by the definition."""

from __future__ import annotations

import numpy as np
import torch

from vllm_steer.engine.pinned_writer import PinnedTableWriter, flush_writers, pack_writes
from vllm_steer.taps.row_write_kernel import launch_writes

SHAPES = (((3,), torch.int32), ((), torch.float32), ((1030,), torch.float32), ((2, 2), torch.int64), ((), torch.int64))
"""Rows of an odd number of words, of one, of more than a program writes at once, and of eight bytes."""


def wrong_tables(seed: int) -> str:
    """Return what the kernel writes otherwise than the definition, on the CPU, or nothing."""
    random, shapes = np.random.default_rng(seed), SHAPES
    tables = [torch.full((9, *shape), 7, dtype=dtype) for shape, dtype in shapes]
    expected = [table.clone() for table in tables]
    own, others = ([PinnedTableWriter(table) for table in each] for each in (tables, expected))
    for one, other in zip(own, others, strict=True):
        for row in random.integers(0, 9, random.integers(0, 6)).tolist():
            value = random.integers(-1000, 1000, one.row_shape).astype(one.dtype)
            one.put(row, value)
            other.put(row, value)
    waiting = [writer for writer in own if writer.values]
    launch_writes(*pack_writes(waiting, pinned=False))
    flush_writers(others)
    wrong = [str(shapes[i]) for i, pair in enumerate(zip(tables, expected, strict=True)) if not torch.equal(*pair)]
    return f"writes {seed}: {', '.join(wrong)}" if wrong or not waiting else ""

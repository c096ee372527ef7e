# SPDX-License-Identifier: Apache-2.0
"""Triton kernel that writes rows of several tables in one launch.

:func:`vllm_steer.engine.pinned_writer.flush_writers` packs the rows and has the definition for tables on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

WRITE_FIELDS = 3
"""Fields of a write, int64: address of the row, first of its words in the upload, and number of its words."""
WORD_BYTES = 4
_WORDS = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_kernel(upload, FIELDS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    write = upload + tl.program_id(0).to(tl.int64) * FIELDS
    row = tl.load(write).to(tl.pointer_type(tl.int32))
    values = upload.to(tl.pointer_type(tl.int32)) + tl.load(write + 1)
    words = tl.load(write + 2)
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        tl.store(row + word, tl.load(values + word, mask=word < words), mask=word < words)


def launch_writes(upload: torch.Tensor, count: int) -> None:
    """Write rows of tables. No row may be written twice.

    Args:
        upload: int64, on the tables' device. It begins with the ``WRITE_FIELDS`` numbers of each write; the words of
            the rows follow.
        count: Number of writes, at least 1.
    """
    grid: Any = (count,)
    _write_kernel[grid](upload, FIELDS=WRITE_FIELDS, WORDS=_WORDS)


def warm_up(device: torch.device) -> None:
    """Compile the kernel, so that the first request with a program does not wait for it."""
    row = torch.zeros(1, dtype=torch.int64, device=device)
    launch_writes(torch.tensor([row.data_ptr(), 2 * WRITE_FIELDS, 2, 0], device=device), 1)

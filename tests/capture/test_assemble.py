# SPDX-License-Identifier: Apache-2.0
"""Rows from chunks: by position, each once, the last one counts."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import HIDDEN, LAYERS, code_of
from vllm_steer.capture.assemble import Assembly, Chunk
from vllm_steer.spec import CaptureSpec


@pytest.mark.failure(9)
def test_recomputed_positions_count_once_and_the_last_time() -> None:
    """Catches rows appended as chunks come, which have the recomputed positions twice."""
    rows = torch.arange(7 * HIDDEN, dtype=torch.float32).view(7, HIDDEN)
    code = code_of("post_block", 1)
    assembly = Assembly(LAYERS, HIDDEN, torch.float32)
    assembly.add(
        [Chunk("r", 0, 4, (code,), rows[:4].numpy().tobytes()), Chunk("r", 2, 3, (code,), rows[4:].numpy().tobytes())]
    )
    spec = CaptureSpec(hooks={"post_block": [1]}, positions="all")
    sites, missing = assembly.finish(spec, 3, 6)
    got = sites["post_block", 1]
    assert missing is None
    assert got.positions.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(got.rows, rows[[0, 1, 4, 5, 6]])
    assert sum(chunk.count for chunk in assembly._chunks) == 7

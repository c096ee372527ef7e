# SPDX-License-Identifier: Apache-2.0
"""Rows from chunks: by position, each once, the last one counts."""

from __future__ import annotations

import torch

from tests.tiny import HIDDEN, LAYERS
from vllm_steer.capture.assemble import Assembly
from vllm_steer.engine.collect import Chunk
from vllm_steer.spec import CaptureSpec


def test_without_positions_as_keys_preemption_would_repeat_rows() -> None:
    """Negative control: chunks joined as they come have the recomputed positions twice."""
    rows = torch.arange(7 * HIDDEN, dtype=torch.float32).view(7, HIDDEN)
    site = 2 * 5
    assembly = Assembly(LAYERS, HIDDEN, torch.float32)
    assembly.add(
        [Chunk("r", 0, 4, (site,), rows[:4].numpy().tobytes()), Chunk("r", 2, 3, (site,), rows[4:].numpy().tobytes())]
    )
    spec = CaptureSpec(hooks={"post_block": [1]}, positions="all")
    sites, missing = assembly.finish(spec, 3, 6)
    got = sites["post_block", 1]
    assert missing is None
    assert got.positions.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(got.rows, rows[[0, 1, 4, 5, 6]])
    assert sum(chunk.count for chunk in assembly._chunks) == 7

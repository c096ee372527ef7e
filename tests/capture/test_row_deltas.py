# SPDX-License-Identifier: Apache-2.0
"""Row deltas of streams: each position once, in order."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import HIDDEN, LAYERS, code_of
from vllm_steer.capture.consumers import make_consumer
from vllm_steer.capture.row_assembler import RowAssembler, RowChunk, RowDelta, RowDeltaStream, merge_deltas
from vllm_steer.errors import SteeringError
from vllm_steer.request import CaptureSpec

SITE = ("post_block", 1)
SPEC = CaptureSpec(hooks={"post_block": [1]}, positions="all")


def chunk(start: int, *values: float) -> RowChunk:
    rows = torch.tensor(values, dtype=torch.float32).view(-1, 1).expand(-1, HIDDEN).contiguous()
    return RowChunk("r", start, len(values), (code_of("post_block", 1),), rows.numpy().tobytes())


def first_components(rows: RowDelta) -> list[tuple[int, float]]:
    return list(zip(rows[SITE].positions.tolist(), rows[SITE].rows[:, 0].tolist(), strict=True))


def test_drafts_and_recomputed_positions_are_skipped() -> None:
    """Catches rows of rejected drafts, and a prompt delivered again after a preemption."""
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    stream = RowDeltaStream(assembler, SPEC)
    assembler.add([chunk(0, 0, 1), chunk(2, 2)])
    assert first_components(stream.next_delta(3, 4)) == [(0, 0), (1, 1), (2, 2)]
    assembler.add([chunk(3, 3, 40, 50)])  # a token and two drafts, of which none is accepted
    assert first_components(stream.next_delta(3, 5)) == [(3, 3)]
    assembler.add([chunk(0, 0, 1, 2, 3), chunk(4, 4)])  # after a preemption
    assert first_components(stream.next_delta(3, 6)) == [(4, 4)]
    assert first_components(stream.next_delta(3, 6)) == []


def test_unconfirmed_rows_wait() -> None:
    """Catches rows lost because they arrive ahead of their output, and those of drafts that are computed again."""
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    stream = RowDeltaStream(assembler, SPEC)
    assembler.add([chunk(0, 0, 1, 2)])
    assert first_components(stream.next_delta(3, 2)) == [(0, 0)]
    assembler.add([chunk(3, 3, 40)])
    assert first_components(stream.next_delta(3, 2)) == []
    assert first_components(stream.next_delta(3, 5)) == [(1, 1), (2, 2), (3, 3)]
    assembler.add([chunk(4, 4)])
    assert first_components(stream.next_delta(3, 6)) == [(4, 4)]
    assembler.add([chunk(5, 5, 6)])
    assert first_components(stream.next_delta(3, 7)) == [(5, 5)]
    assert first_components(stream.next_delta(3, 8)) == [(6, 6)]


def test_merged_deltas_are_in_order() -> None:
    """Catches rows lost when vLLM merges deltas that a slow client has not read."""
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    stream = RowDeltaStream(assembler, SPEC)
    assembler.add([chunk(0, 0, 1)])
    first = {"memory": stream.next_delta(2, 3)}
    assembler.add([chunk(2, 2)])
    both = merge_deltas(first, {"memory": stream.next_delta(2, 4)})
    assert both is not None and first_components(both["memory"]) == [(0, 0), (1, 1), (2, 2)]
    assert merge_deltas(None, first) is merge_deltas(first, None) is first
    assert merge_deltas(None, None) is None


@pytest.mark.parametrize("reduce", ["mean", "last"])
def test_reductions_cannot_be_streamed(reduce: str) -> None:
    """Catches the mean of the last delta returned as the mean of all rows."""
    spec = CaptureSpec(hooks={"post_block": [1]}, reduce=reduce, options={"stream": True})
    with pytest.raises(SteeringError, match=f"reduce '{reduce}' cannot be streamed"):
        make_consumer("memory").check(spec, "capture.memory")
    make_consumer("memory").check(CaptureSpec(hooks={"post_block": [1]}, options={"stream": True}), "capture.memory")

# SPDX-License-Identifier: Apache-2.0
"""Rows piece by piece: each position once and in order, whatever comes twice."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import HIDDEN, LAYERS, code_of
from vllm_steer.capture.consumers import make_consumer
from vllm_steer.capture.row_assembler import RowAssembler, RowChunk
from vllm_steer.capture.row_deltas import RowDelta, RowDeltaStream, merge_deltas
from vllm_steer.errors import SteeringError
from vllm_steer.spec import CaptureSpec

SITE = ("post_block", 1)
SPEC = CaptureSpec(hooks={"post_block": [1]}, positions="all")


def chunk(start: int, *values: float) -> RowChunk:
    rows = torch.tensor(values, dtype=torch.float32).view(-1, 1).expand(-1, HIDDEN).contiguous()
    return RowChunk("r", start, len(values), (code_of("post_block", 1),), rows.numpy().tobytes())


def shown(rows: RowDelta) -> list[tuple[int, float]]:
    return list(zip(rows[SITE].positions.tolist(), rows[SITE].rows[:, 0].tolist(), strict=True))


def test_drafts_are_held_back_and_what_is_computed_again_is_left_out() -> None:
    """Catches a rejected draft's row given away before its token is known, and a preempted prompt given twice."""
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    stream = RowDeltaStream(assembler, SPEC)
    assembler.add([chunk(0, 0, 1), chunk(2, 2)])
    assert shown(stream.next_delta(3, 4)) == [(0, 0), (1, 1), (2, 2)]
    assembler.add([chunk(3, 3, 40, 50)])  # a token and two drafts, of which none is accepted
    assert shown(stream.next_delta(3, 5)) == [(3, 3)]
    assembler.add([chunk(0, 0, 1, 2, 3), chunk(4, 4)])  # after a preemption
    assert shown(stream.next_delta(3, 6)) == [(4, 4)]
    assert shown(stream.next_delta(3, 6)) == []


def test_pieces_are_merged_in_order() -> None:
    """Catches the rows of a piece that a slow reader never saw by itself."""
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    stream = RowDeltaStream(assembler, SPEC)
    assembler.add([chunk(0, 0, 1)])
    one = {"memory": stream.next_delta(2, 3)}
    assembler.add([chunk(2, 2)])
    both = merge_deltas(one, {"memory": stream.next_delta(2, 4)})
    assert both is not None and shown(both["memory"]) == [(0, 0), (1, 1), (2, 2)]
    assert merge_deltas(None, one) is merge_deltas(one, None) is one
    assert merge_deltas(None, None) is None


@pytest.mark.parametrize("reduce", ["mean", "last"])
def test_what_exists_only_at_the_end_is_not_streamed(reduce: str) -> None:
    """Catches a mean of the last piece, given for that of all."""
    spec = CaptureSpec(hooks={"post_block": [1]}, reduce=reduce, options={"stream": True})
    with pytest.raises(SteeringError, match=f"reduce '{reduce}' cannot be streamed"):
        make_consumer("memory").check(spec, "capture.memory")
    make_consumer("memory").check(CaptureSpec(hooks={"post_block": [1]}, options={"stream": True}), "capture.memory")

# SPDX-License-Identifier: Apache-2.0
"""Which row a token takes, from its position and its request's segments."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_steer.config import SteeringConfig
from vllm_steer.taps.rows import assign_rows, clear_rows
from vllm_steer.taps.tables import END, Tables


def make_tables() -> Tables:
    config = SteeringConfig(max_rows=8, max_vectors=1, max_instructions=1, max_segments=4)
    return Tables(
        config,
        num_sites=3,
        hidden_size=8,
        max_tokens=64,
        max_requests=5,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@given(st.data())
def test_rows_follow_the_segments_of_each_tokens_own_request(data: st.DataObject) -> None:
    """Catches neighbours' rows, off-by-one at a boundary, and padding that is steered."""
    tables = make_tables()
    segments = {}
    for slot in range(5):
        starts = [0, *sorted(data.draw(st.sets(st.integers(1, 40), max_size=3)))]
        rows = [data.draw(st.integers(0, 8)) for _ in starts]
        segments[slot] = list(zip(starts, rows, strict=True))
        tables.segment_start[slot, : len(starts)] = torch.tensor(starts, dtype=torch.int32)
        tables.segment_start[slot, len(starts) :] = END
        tables.segment_row[slot, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
    tokens = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50)), min_size=1, max_size=30))
    tables.token_row.fill_(7)
    slots = torch.tensor([slot for slot, _ in tokens])
    positions = torch.tensor([position for _, position in tokens])
    assign_rows(tables, slots, positions, num_padded=len(tokens) + 3)
    expected = [[row for start, row in segments[slot] if start <= position][-1] for slot, position in tokens]
    assert tables.token_row[: len(tokens)].tolist() == expected
    assert tables.token_row[len(tokens) : len(tokens) + 3].tolist() == [0, 0, 0]


def test_cleared_rows_are_zero() -> None:
    """Catches a dummy step that runs with the last step's rows."""
    tables = make_tables()
    tables.token_row.fill_(3)
    clear_rows(tables, 10)
    assert tables.token_row.tolist() == [0] * 10 + [3] * 54

# SPDX-License-Identifier: Apache-2.0
"""Assignment of rows to tokens by position and segment."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_steer.config import SteeringConfig
from vllm_steer.taps.assignment import BatchLayout, assign_rows, clear_rows
from vllm_steer.taps.tables import OPEN_END, Tables


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


def batch_layout(requests: list[tuple[int, int, int]], device: str = "cpu") -> BatchLayout:
    """Return the layout of a batch of ``(slot, first position, tokens)``."""
    counts = [count for _, _, count in requests]
    return BatchLayout(
        request_slot=torch.tensor([slot for slot, _, _ in requests], device=device),
        start=torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=device),
        position=torch.tensor([first + i for _, first, count in requests for i in range(count)], device=device),
        token=torch.zeros(sum(counts), dtype=torch.int32, device=device),
    )


@given(st.data())
def test_assigns_rows_by_the_segments_of_the_own_request(data: st.DataObject) -> None:
    """Catches rows of a neighbour, off-by-one segment boundaries, and steered padding."""
    tables = make_tables()
    segments = {}
    for slot in range(5):
        starts = [0, *sorted(data.draw(st.sets(st.integers(1, 40), max_size=3)))]
        rows = [data.draw(st.integers(0, 8)) for _ in starts]
        segments[slot] = list(zip(starts, rows, strict=True))
        tables.segment_start[slot, : len(starts)] = torch.tensor(starts, dtype=torch.int32)
        tables.segment_start[slot, len(starts) :] = OPEN_END
        tables.segment_row[slot, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
    order = data.draw(st.permutations(range(5)).flatmap(lambda slots: st.sampled_from([slots[:n] for n in (1, 3, 5)])))
    requests = [(slot, data.draw(st.integers(0, 45)), data.draw(st.integers(1, 8))) for slot in order]
    tokens = [(slot, first + i) for slot, first, count in requests for i in range(count)]
    tables.token_row.fill_(7)
    assign_rows(tables, batch_layout(requests), num_padded=len(tokens) + 3)
    expected = [[row for start, row in segments[slot] if start <= position][-1] for slot, position in tokens]
    assert tables.token_row[: len(tokens)].tolist() == expected
    assert tables.token_row[len(tokens) : len(tokens) + 3].tolist() == [0, 0, 0]


def test_clear_rows() -> None:
    """Catches a dummy step that runs with the rows of the last step."""
    tables = make_tables()
    tables.token_row.fill_(3)
    clear_rows(tables, 10)
    assert tables.token_row.tolist() == [0] * 10 + [3] * 54

# SPDX-License-Identifier: Apache-2.0
"""Views of the table of first instructions, which are inputs of compiled code that layers share."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.points import OPTIONAL_POINTS, points_on
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import _launches

LAYERS = 9
INDUCTOR_BYTES = 16
"""``GPU_ALIGN_BYTES`` in ``torch/_inductor/utils.py``."""
CHOICES = [chosen for n in range(len(OPTIONAL_POINTS) + 1) for chosen in combinations(OPTIONAL_POINTS, n)]


def make_tables(points: tuple[str, ...]) -> Tables:
    config = SteeringConfig(max_rows=2, max_vectors=1, max_instructions=1, capture_rows=1, points=points)
    return Tables(
        config, num_sites=LAYERS * len(points_on(points)), hidden_size=8, max_tokens=4, max_requests=1,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("points", CHOICES, ids=str)
def test_views_of_a_point_have_the_same_alignment_in_all_layers(points: tuple[str, ...]) -> None:
    """Catches views that Inductor copies in some layers, where edits and captures would be lost on a GPU."""
    tables = make_tables(points)
    names = points_on(points)
    heads = [tables.head_column(column) for column in range(tables.num_sites)]
    for index in range(len(names)):
        offsets = {head.storage_offset() * head.itemsize % INDUCTOR_BYTES for head in heads[index :: len(names)]}
        assert len(offsets) == 1, names[index]
    assert [tables.column_at(head) for head in heads] == list(range(tables.num_sites))


def test_refuses_a_copy_of_a_view() -> None:
    """Catches a tap that takes a copy for the first site and does not run when that site is unused."""
    tables = make_tables(())
    head = tables.head_column(4)
    tables.active_sites = [column == 4 for column in range(tables.num_sites)]
    assert _launches(tables, head, None)
    flat = torch.as_strided(head, (tables.head.numel() - 5,), (1,)).clone()
    copy = torch.as_strided(flat, head.size(), head.stride())
    with pytest.raises(RuntimeError, match=r"a copy of its view .*--enforce-eager"):
        _launches(tables, copy, None)
    with pytest.raises(RuntimeError, match=r"a copy of its view .*--enforce-eager"):
        _launches(tables, tables.head_column(3), copy)

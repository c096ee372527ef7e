# SPDX-License-Identifier: Apache-2.0
"""Tests of the device tables that hold the programs of running requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.steps import make_tables
from vllm_steer import SamplingParams
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.program import program
from vllm_steer.program.program_cache import ProgramCache
from vllm_steer.taps.tables import Tables

LAYERS, POINTS, HIDDEN = 4, 3, 8


def steered(layer: int, value: float) -> Any:
    return SamplingParams(steering_vectors={"post_block": {layer: np.full(HIDDEN, value)}})


def made() -> tuple[Tables, ProgramStore]:
    config = SteeringConfig(max_rows=8, max_vectors=8, max_instructions=8, capture_rows=1)
    tables = make_tables(config, num_sites=LAYERS * POINTS, max_tokens=4)
    return tables, ProgramStore(tables, config, LAYERS, range(LAYERS))


def in_use(store: ProgramStore) -> tuple[int, int, int]:
    return store._allocator.in_use[:3]


def test_counts_the_users_of_each_site() -> None:
    """Catches a site that counts as unused while a row edits it.

    On a GPU its tap would return early and the request would run unsteered without an error.
    """
    tables, store = made()

    def users() -> dict[int, int]:
        store.flush()
        counts = tables.head[0].tolist()
        found = {site: counts[column] for site, column in enumerate(tables.head_index) if counts[column]}
        for site, number in found.items():
            # Rows that were released keep their instructions.
            assert tables.head_column(site)[1:].count_nonzero() >= number, "the instructions are in another column"
        return found

    assert users() == {}
    first, other = POINTS * 1 + 2, POINTS * 3 + 2
    store.add("a", 0, steered(1, 1.0), 5)
    assert users() == {first: 1}
    store.add("b", 1, steered(1, 2.0), 5)
    store.add("c", 2, steered(3, 2.0), 5)
    store.add("d", 3, steered(1, 1.0), 5)  # shares the row of "a"
    assert users() == {first: 2, other: 1}
    store.remove("a")
    store.remove("c")
    assert users() == {first: 2}
    store.remove("d")
    store.remove("b")
    assert users() == {}
    store.add("e", 0, steered(3, 1.0), 5)
    assert users() == {other: 1}


@pytest.mark.parametrize("again", [False, True], ids=["one_object", "decoded_again"])
def test_equal_programs_share_entries_until_the_last_ends(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """Catches (1) a request that ends and frees the row of a running one and (2) entries that are never freed.

    Also for equal programs that are distinct objects, because the first has left the program cache.
    """
    tables, store = made()
    ones = [1.0] * HIDDEN

    def rows() -> list[int]:
        store.flush()
        return tables.segment_row[:, 0].tolist()

    for name, slot in (("a", 0), ("b", 2), ("c", 1)):
        if again:
            monkeypatch.setattr(program, "PROGRAM_CACHE", ProgramCache())
        store.add(name, slot, steered(1, 1.0), 5)
    assert len({id(store.resolved_of(name)) for name in "abc"}) == (3 if again else 1)
    place, *_ = rows()
    assert place and rows() == [place, place, place, 0]
    for name, slot in (("a", 0), ("c", 1)):
        store.remove(name)
        assert in_use(store) == (1, 1, 1) and rows()[slot] == 0 and rows()[2] == place
        (vector,) = store.resolved_of("b").token_programs[0].vectors
        assert tables.vector[store._allocator.vector_index(vector)].tolist() == ones
    store.remove("b")
    assert in_use(store) == (0, 0, 0) and rows() == [0] * 4 and store.num_with_program == 0
    store.add("d", 3, steered(1, 1.0), 5)
    assert in_use(store) == (1, 1, 1) and rows()[:3] == [0] * 3 and rows()[3]


def test_segments_depend_on_the_prompt_length() -> None:
    """Catches a prompt that is edited up to the end of another prompt."""
    tables, store = made()
    first = SamplingParams(prefill_steering_vectors={"post_block": {1: np.ones(HIDDEN)}})
    for slot, length in enumerate((5, 9, 5)):
        store.add(f"of {length} at {slot}", slot, first, length)
    store.flush()
    assert tables.segment_start[:3, 1].tolist() == [5, 9, 5]
    assert in_use(store) == (1, 1, 1)
    overlap = store.active_ranges.overlap(np.arange(3, dtype="i4"), np.full(3, 5), np.full(3, 6))
    assert overlap.tolist() == [False, True, False]


def test_keeps_a_projection_until_its_last_request_ends() -> None:
    """Catches directions that are freed while a second request still uses them."""
    _, store = made()
    wanted = SamplingParams(
        capture={"memory": {"hooks": {"post_block": [1]}, "reduce": {"directions": np.eye(2, HIDDEN)}}}
    )
    for slot, length in enumerate((5, 5, 6)):
        store.add(f"{slot}", slot, wanted, length)
    (projection,) = {form.projection for row in store.resolved_of("0").token_programs for form in row.row_formats}
    for left in (2, 1):
        store.remove(f"{left - 1}")
        store.flush()
        assert store.num_capturing == left and store.directions(projection).tolist() == np.eye(2, HIDDEN).tolist()
    store.remove("2")
    assert store.num_capturing == 0 and not store._directions

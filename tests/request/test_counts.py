# SPDX-License-Identifier: Apache-2.0
"""Lists are counted before anything in them is read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_steer import Selector, SteeringError
from vllm_steer.limits import MAX_EDITS, MAX_LISTED
from vllm_steer.params import compile_fields
from vllm_steer.request import matrix, selector, sites
from vllm_steer.request.counts import count_directions, count_edits

EDIT: dict[str, Any] = {"kind": "add", "point": "post_block", "layers": 1, "vector": [1.0, 2.0]}
PROBE: dict[str, Any] = {"probe": [1.0, 2.0], "point": "post_block", "layer": 1}
LONG = list(range(0, 131072, 2))
TIMES = MAX_LISTED // len(LONG) + 1


class Unread(list[Any]):
    """A list that can be counted but not read."""

    def __iter__(self) -> Any:
        raise AssertionError("the list was read before it was refused")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"steering": [{**EDIT, "tokens": Unread(LONG)}] * TIMES}, "steering"),
        ({"steering": [{**EDIT, "tokens": {"generated": Unread(LONG)}}] * TIMES}, "steering"),
        ({"steering": [{**EDIT, "layers": Unread(LONG)}] * TIMES}, "steering"),
        ({"readouts": {f"r{i}": {**PROBE, "positions": Unread(LONG)} for i in range(TIMES)}}, "readouts"),
        ({"stop_on": [{"readout": "r", "positions": Unread(LONG)}] * TIMES}, "stop_on"),
        ({"capture": {f"c{i}": {"hooks": {"post_block": Unread(LONG)}} for i in range(TIMES)}}, "capture"),
        ({"steering": [{**EDIT, "when": [{"readout": "r", "positions": Unread(LONG)}]}] * TIMES}, "steering"),
        ({"steering": [{**EDIT, "when": Unread([{}] * 16)}] * 17}, "steering"),
        ({"steering": [{**EDIT, "vector": Unread([1.0])}] * (MAX_EDITS + 1)}, "steering"),
    ],
)
def test_long_lists_are_refused_unread(fields: dict[str, Any], path: str) -> None:
    """Catches seconds of work over a list of a request that is refused for its length afterwards."""
    with pytest.raises(SteeringError) as refused:
        compile_fields(fields)
    assert refused.value.field == path


def test_the_largest_lists_are_read() -> None:
    """Negative control: catches a count that refuses what the limits allow."""
    compile_fields({"steering": [{**EDIT, "tokens": [*range(65536)]}] * (MAX_LISTED // 65536 - 1)})


@given(st.lists(st.integers(-12, 12), min_size=1, max_size=12, unique=True))
def test_lists_of_positions_are_read_as_their_pairs(positions: list[int]) -> None:
    """Catches another selection by the conversion in one call, and an order that is lost."""
    pairs = [position if position == -1 else [position, position + 1] for position in positions]
    assert Selector(positions) == Selector(pairs)


def test_plain_integers_are_converted_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loop over each position or layer."""

    def fail(*_: object) -> Any:
        raise AssertionError("an item was read by itself")

    monkeypatch.setattr(selector, "_item_interval", fail)
    monkeypatch.setattr(sites, "read_layer", fail)
    edit = {**EDIT, "kind": "replace", "vector": [[1.0, 2.0]] * 4, "tokens": [0, 2, 4, -1], "layers": [1, 2, 3]}
    compile_fields({"steering": [edit, {**EDIT, "layers": [1], "tokens": {"generated": [1, 5]}}]})


@pytest.mark.parametrize("items", [[True, 2], [1.0, 2], [10**30, 1], [2**31, 1], ["1", 2], [None, 2]])
def test_wrong_items_keep_their_path(items: list[Any]) -> None:
    """Catches a boolean or a huge number that the conversion accepts."""
    with pytest.raises(SteeringError) as refused:
        Selector(items)
    assert refused.value.field.startswith("tokens[0]")


def test_a_subspace_is_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a decomposition for each of a thousand edits with the same subspace."""
    calls: list[int] = []
    normalized = matrix._normalized
    monkeypatch.setattr(matrix, "_normalized", lambda data, count: calls.append(count) or normalized(data, count))
    edit = {**EDIT, "kind": "replace", "vector": [1.0, 2.5], "subspace": [[3.0, 4.25]]}
    compile_fields({"steering": [{**edit, "layers": layer} for layer in range(20)]})
    assert len(calls) == 2  # the rank and the basis


def test_directions_are_counted_once() -> None:
    """Catches a study with one subspace at all sites that is refused, and distinct ones that are not counted."""
    same = {"steering": [{**EDIT, "subspace": [[1, 0], [0, 1]]}] * 9}
    other = {"steering": [{**EDIT, "subspace": [[1, i]]} for i in range(9)]}
    packed = {"steering": [{**EDIT, "subspace": {"dtype": "float32", "shape": [5, 2], "data": ""}}]}
    assert list(map(count_directions, (same, other, packed))) == [2, 9, 5]
    assert count_edits({**same, "steering_vectors": {"post_block": {"1": [1], "2": [1]}}}) == 11
    assert count_directions({"steering": [{"subspace": {"shape": ["x"]}}, {"subspace": 1}, 3]}) == 0

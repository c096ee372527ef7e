# SPDX-License-Identifier: Apache-2.0
"""Selectors against a definition position by position, and every malformed one refused."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_steer.errors import SteeringError
from vllm_steer.request import OPEN_END, Selector

SPAN = 12  # positions and prompt lengths of the property tests stay below this
positions = st.integers(-SPAN, SPAN)
pairs = st.tuples(positions, st.none() | positions).map(list)
item_lists = st.lists(positions | pairs, min_size=1, max_size=6)
prompt_lens = st.integers(1, SPAN)


def selectors():
    def parsed(value):
        try:
            return Selector.parse(value)
        except SteeringError:
            return None

    names = st.sampled_from(["all", "prompt", "generated", "last_prompt"])
    ranges = st.builds(range, positions, positions)
    return (names | item_lists | ranges).map(parsed).filter(lambda selector: selector is not None)


def absolute(bound, prompt_len):
    return bound + prompt_len if bound < 0 else bound


def refused_by_definition(items, prompt_len):
    """Whether some item reaches before position 0 or covers nothing, or a position is listed twice."""
    listed = [item for item in items if isinstance(item, int)]
    if len(set(listed)) < len(listed):
        return True
    for item in items:
        start, stop = (item, None) if isinstance(item, int) else item
        if absolute(start, prompt_len) < 0 or (stop is not None and absolute(stop, prompt_len) < 0):
            return True
        if stop is not None and absolute(start, prompt_len) >= absolute(stop, prompt_len):
            return True
    return False


def covers(items, position, prompt_len):
    """The definition: whether one position is covered."""
    for item in items:
        if isinstance(item, int):
            if position == absolute(item, prompt_len):
                return True
        elif position >= absolute(item[0], prompt_len) and (
            item[1] is None or position < absolute(item[1], prompt_len)
        ):
            return True
    return False


def covered(intervals, position):
    return any(start <= position < stop for start, stop in intervals)


def assert_refused(value, field, *words):
    with pytest.raises(SteeringError) as caught:
        Selector.parse(value, "t")
    assert caught.value.field == field
    for word in words:
        assert word in caught.value.problem
    assert len(str(caught.value)) < 400


class TestIntervals:
    @given(item_lists, prompt_lens)
    def test_list_covers_what_the_definition_covers(self, items, prompt_len):
        try:
            intervals = Selector.parse(items).intervals(prompt_len)
        except SteeringError:
            # Refused at parse, for every prompt, or here, for this one; never for nothing.
            assert refused_by_definition(items, prompt_len)
            return
        assert not refused_by_definition(items, prompt_len)
        for position in range(3 * SPAN):
            assert covered(intervals, position) == covers(items, position, prompt_len)
        open_ended = any(isinstance(item, list) and item[1] is None for item in items)
        assert (intervals[-1][1] == OPEN_END) == open_ended

    @given(selectors(), prompt_lens)
    def test_intervals_are_sorted_disjoint_apart_and_not_empty(self, selector, prompt_len):
        try:
            intervals = selector.intervals(prompt_len)
        except SteeringError:
            return
        assert isinstance(intervals, tuple) and intervals
        bounds = [bound for interval in intervals for bound in interval]
        assert all(type(bound) is int for bound in bounds)
        assert bounds == sorted(set(bounds)), "touching or empty intervals repeat a bound"
        assert bounds[0] >= 0 and bounds[-1] <= OPEN_END

    @settings(max_examples=300)
    @given(positions, positions, st.sampled_from([1, -1, 2, -3]), prompt_lens)
    def test_range_is_the_list_of_its_positions(self, start, stop, step, prompt_len):
        listed = range(start, stop, step)
        if not listed:
            assert_refused(listed, "t", "is empty")
            return
        if refused_by_definition(listed, prompt_len):
            with pytest.raises(SteeringError):
                Selector.parse(listed).intervals(prompt_len)
            return
        as_range = Selector.parse(listed).intervals(prompt_len)
        assert as_range == Selector.parse(list(listed)).intervals(prompt_len)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("all", (0, OPEN_END)), ("prompt", (0, 7)), ("generated", (7, OPEN_END)), ("last_prompt", (6, 7))],
    )
    def test_names(self, name, expected):
        assert Selector.parse(name).intervals(7) == (expected,)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ([-1], ((6, 7),)),
            ([[-3, -1]], ((4, 6),)),
            ([[-3, -1], -1], ((4, 7),)),
            (range(-3, 0), ((4, 7),)),
            (range(-2, 2), ((0, 2), (5, 7))),
            ([[2, -1]], ((2, 6),)),
            ([[-2, 10]], ((5, 10),)),
            ([[-2, None]], ((5, OPEN_END),)),
            ([5, 3, 4], ((3, 6),)),
            ([[0, 2], [2, 4]], ((0, 4),)),
            (range(10**9), ((0, 10**9),)),
            ([np.int64(3), (np.int8(5), np.int32(7))], ((3, 4), (5, 7))),
        ],
        ids=str,
    )
    def test_examples(self, value, expected):
        assert Selector.parse(value).intervals(7) == expected

    @pytest.mark.parametrize("value", [[-8], [[-8, None]], [[-8, -1]], [[0, -8]], range(-8, 0)], ids=str)
    def test_reaching_before_the_prompt(self, value):
        """Catches clipping to position 0, which would steer other tokens than asked."""
        with pytest.raises(SteeringError) as caught:
            Selector.parse(value).intervals(7, "steering[1].tokens")
        assert caught.value.field == "steering[1].tokens"
        assert "before the start of a prompt of 7" in caught.value.problem
        Selector.parse(value).intervals(20)

    @pytest.mark.parametrize("value", [[[6, -1]], [[7, -1]], [[-1, 3]], [[0, -7]], [[-1, 6]]], ids=str)
    def test_empty_only_for_this_prompt(self, value):
        with pytest.raises(SteeringError, match="is empty for a prompt of 7"):
            Selector.parse(value).intervals(7)

    @pytest.mark.parametrize("prompt_len", [0, -1])
    def test_no_prompt(self, prompt_len):
        with pytest.raises(SteeringError, match="at least one token"):
            Selector.parse("generated").intervals(prompt_len)


class TestMaxPosition:
    @given(item_lists)
    def test_is_the_largest_absolute_position_named(self, items):
        """Catches a position lost when spans are merged, which then escapes the check against the model."""
        try:
            selector = Selector.parse(items)
        except SteeringError:
            return
        named = [-1]
        for item in items:
            start, stop = (item, None) if isinstance(item, int) else item
            named += [start] if start >= 0 else []
            named += [stop - 1] if stop is not None and stop > 0 else []
        assert selector.max_position == max(named)

    @pytest.mark.parametrize("name", ["all", "prompt", "generated", "last_prompt"])
    def test_names_have_none(self, name):
        assert Selector.parse(name).max_position == -1

    def test_open_pair_does_not_swallow_a_position(self):
        assert Selector.parse([[0, None], 9000]).max_position == 9000


class TestValue:
    @given(selectors())
    @example(Selector(range(-3, 0)))  # reaches the prompt's end, which no written pair can say
    @example(Selector(range(-3, 3)))
    def test_wire_round_trip(self, selector):
        wire = selector.to_wire()
        assert Selector.from_wire(wire) == selector
        assert Selector.from_wire(json.loads(json.dumps(wire))) == selector
        assert Selector.from_wire(wire).to_wire() == wire
        assert Selector.from_wire(wire).max_position == selector.max_position

    @given(selectors())
    def test_copies_are_equal_and_hash_alike(self, selector):
        for other in (pickle.loads(pickle.dumps(selector)), copy.deepcopy(selector)):  # noqa: S301
            assert other == selector and hash(other) == hash(selector)
        assert eval(repr(selector), {"Selector": Selector}) == selector  # noqa: S307

    def test_equal_by_content_not_by_writing(self):
        assert Selector([3, 4, 5]) == Selector([[3, 6]]) == Selector([5, [3, 5]]) == Selector(range(3, 6))
        assert Selector([-3, -2, -1]) == Selector(range(-3, 0)) == Selector([[-3, -1], -1])
        assert Selector([3]) != Selector([4]) and Selector("prompt") != Selector("all")

    def test_frozen(self):
        with pytest.raises(AttributeError):
            Selector("all")._where = "prompt"

    def test_parse_keeps_a_selector(self):
        selector = Selector.parse([1])
        assert Selector.parse(selector) is selector
        assert Selector(selector) == selector


REFUSED = [
    *((value, "t", ["a range, a list of positions and [start, stop] pairs, or a dict with generated"])
      for value in (None, 5, 1.5, True, b"all", {}, {1, 2}, {"start": 0}, np.array([1]))),
    *((value, "t", ["use one of all, prompt, generated, last_prompt"])
      for value in ("", "All", "last", "all ", "\ud800")),
    ([], "t", ["0 items"]),
    # Two tokens, or the range 3 to 6.
    ((3, 7), "t", ["[3, 7]", "[(3, 7)]"]),
    *(([0, item], "t[1]", ["position"])
      for item in (True, np.True_, 1.0, "1", None, [], [1], [1, 2, 3], {}, "ab", range(2))),
    *((value, field, ["integer"])
      for bound in (True, 1.0, "1", [1]) for value, field in (([[bound, 5]], "t[0][0]"), ([[0, bound]], "t[0][1]"))),
    ([[None, 5]], "t[0][0]", ["integer"]),
    *(([1, pair], "t[1]", ["empty"]) for pair in ([3, 3], [4, 3], [-1, -1], [-1, -2], [0, 0], [-3, 0], [3, 0])),
    *((value, field, ["between"])
      for place in (OPEN_END, -OPEN_END, 2**63, -(2**63), 10**5000)
      for value, field in (([place], "t[0]"), ([[0, place]], "t[0][1]"), (range(place, place + 1), "t"))),
    (range(10**40), "t", []),  # larger than memory
    (range(0, 10**9, 2), "t", []),
    ([0] * 65537, "t", ["65537"]),
    # Common values that should lead to the valid form.
    (-1, "t", ["write [-1] for one position"]),
    (np.arange(3), "t", ["convert positions with .tolist()"]),
    ("all_prompt", "t", ["'all_prompt' is not valid; it is prompt here"]),
]  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize(("value", "field", "words"), REFUSED, ids=map(str, range(len(REFUSED))))
    def test_by_path(self, value, field, words):
        """Catches a wrong selector that is accepted or read as another one, and an error without its path."""
        assert_refused(value, field, *words)

    @pytest.mark.parametrize(
        "mask",
        [
            [0, 0, 1, 1],
            [1, 1],
            [np.int64(0), np.int64(1), 0],
            [True, False],
            [False],
            [np.True_, np.False_],
            np.array([0, 0, 1]),
            np.array([True, False]),
            torch.tensor([0, 0, 1, 1]),
            torch.tensor([True, False]),
        ],
        ids=repr,
    )
    def test_mask(self, mask):
        """Catches a mask of the tokens to edit that is read as the positions 0 and 1, and a hint that leads there."""
        for value, field in ((mask, "t"), ({"generated": mask}, "t.generated")):
            with pytest.raises(SteeringError) as caught:
                Selector.parse(value, "t")
            assert caught.value.field.startswith(field) and ("tolist" in str(caught.value)) == hasattr(mask, "tolist")
            assert "for a mask, list the numbers of its entries: [i for i, chosen" in caught.value.problem

    def test_repeated_position(self):
        """Catches a position that counts once where a list, such as rows of a matrix, has it twice."""
        assert_refused([5, 3, [0, 2], 5], "t[3]", "repeats position 5; name each position once")
        assert_refused({"generated": [2, 2]}, "t.generated[1]", "repeats position 2")
        assert Selector([0, 1]) == Selector([1, 0]) == Selector([[0, 2]])

    @pytest.mark.parametrize(
        ("pair", "words"),
        [
            ([3, -1], ["[3, -1] is empty", "starts at 3 and stops before 3", "null means no end"]),
            ([-2, 1], ["[-2, 1] is empty", "starts at 2 and stops before 1"]),
        ],
    )
    def test_pair_that_is_empty_for_the_prompt(self, pair, words):
        """Catches an error that does not show how the pair was resolved."""
        with pytest.raises(SteeringError) as caught:
            Selector([pair]).intervals(4)
        assert all(word in caught.value.problem for word in words)
        assert ("null" in caught.value.problem) == (pair[1] < 0)


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        ("all", 10, ()),
        ("prompt", 10, ()),
        ("generated", 10, ([10, None],)),
        ("generated", 11, ()),
        ([500], 10, (500,)),
        ([9, 10], 10, (10,)),
        ([3, 500], 10, (500,)),
        ([[5, 15]], 10, ([10, 15],)),
        ([[5, None]], 10, ()),
        ([[12, None]], 10, ([12, None],)),
        ([-1], 10, ()),
        ([-1], 0, (9,)),
        (range(8, 12), 10, ([10, 12],)),
    ],
)
def test_beyond(tokens, stop, expected):
    """Catches positions without a token that are not reported, and an open range that is reported while it has some."""
    selector = Selector(tokens)
    assert selector.beyond(10, stop) == expected

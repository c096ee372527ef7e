# SPDX-License-Identifier: Apache-2.0
"""Segments against a per-position definition of selectors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_steer import SamplingParams
from vllm_steer.errors import SteeringError
from vllm_steer.params import program_of
from vllm_steer.program import Program, compile_program, resolve
from vllm_steer.program.instructions import CODES
from vllm_steer.request import CaptureSpec, Edit, parse_readouts

LAYERS = 3
module = sys.modules[resolve.__module__]
selectors = st.one_of(
    st.sampled_from(["all", "prompt", "generated", "last_prompt"]),
    st.lists(
        st.one_of(
            st.integers(-4, 25),
            st.tuples(st.integers(0, 12), st.integers(13, 25)).map(list),
            st.tuples(st.integers(-4, -1), st.none()).map(list),
        ),
        min_size=1,
        max_size=3,
        unique_by=str,
    ),
)


def edit(seed: int, tokens: object = "all", point: str = "post_block", layers: object = 1, kind: str = "add") -> Edit:
    vector = np.random.default_rng(seed).standard_normal(4)
    return Edit(kind=kind, point=point, layers=layers, vector=vector, tokens=tokens)  # type: ignore[arg-type]


def names(entry: object, position: int, prompt_len: int) -> bool:
    """Return whether one entry of a selector covers a position."""
    if isinstance(entry, str):
        return {
            "all": True,
            "prompt": position < prompt_len,
            "generated": position >= prompt_len,
            "last_prompt": position == prompt_len - 1,
        }[entry]
    if isinstance(entry, int):
        return position == (entry if entry >= 0 else prompt_len + entry)
    start, stop = entry  # type: ignore[misc]
    start = start if start >= 0 else prompt_len + start
    return bool(start <= position < (10**9 if stop is None else stop))


@given(st.lists(selectors, max_size=4), st.integers(4, 20))
def test_each_position_gets_the_edits_that_select_it(chosen: list[object], prompt_len: int) -> None:
    """Catches off-by-one errors at boundaries, a wrong order of edits, and generated tokens treated as prompt."""
    edits = [edit(i, tokens) for i, tokens in enumerate(chosen)]
    program = compile_program(edits)
    resolved = resolve(program, prompt_len, LAYERS)
    starts = [segment.start for segment in resolved.segments]
    assert starts == sorted(set(starts))
    for position in range(30):
        active = [s for s in resolved.segments if s.start <= position]
        row = active[-1].program if active else None
        got = () if row is None else tuple(step.digest for step in row.edits)
        expected = tuple(
            step.digest
            for step, tokens in zip(program.edits, chosen, strict=True)
            if any(names(entry, position, prompt_len) for entry in ([tokens] if isinstance(tokens, str) else tokens))
        )
        assert got == expected, position


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [("all", [0]), ("prompt", [0, 5]), ("generated", [0, 5]), ([[2, None]], [0, 2]), ([1, [3, 7]], [0, 1, 2, 3, 7])],
    ids=str,
)
def test_segment_starts(tokens: object, starts: list[int]) -> None:
    """Catches a segment that begins where no position is: a request would need one place more than it uses."""
    resolved = resolve(compile_program([edit(0, tokens)]), 5, LAYERS)
    assert [segment.start for segment in resolved.segments] == starts


@pytest.fixture
def programs_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each row that is made."""
    made: list[int] = []
    real = module._token_program

    def noted(*args: Any) -> Any:
        made.append(1)
        return real(*args)

    monkeypatch.setattr(module, "_token_program", noted)
    return made


@pytest.mark.parametrize("edits", [1, 8])
def test_rejects_too_many_boundaries_early(programs_made: list[int], edits: int) -> None:
    """Catches a request of a few KiB that blocks an API server for seconds."""
    program = compile_program([edit(i, list(range(i, 30_000, 2))) for i in range(edits)])
    with pytest.raises(SteeringError, match="more than 2048 positions") as refused:
        resolve(program, 4, LAYERS)
    assert refused.value.field == "steering"
    assert programs_made == []


def test_rejects_too_many_segments_early(programs_made: list[int]) -> None:
    """Catches (1) a thousand token programs made for a limit of 32 and (2) a cached resolution above the limit."""
    program = compile_program([edit(0, list(range(1, 2001, 2)))])
    with pytest.raises(SteeringError, match="more than 32 token segments"):
        resolve(program, 4, LAYERS, max_segments=32)
    assert len(programs_made) <= 33
    small = compile_program([edit(0, [1, 3])])
    assert len(resolve(small, 4, LAYERS, max_segments=5).segments) == 5
    with pytest.raises(SteeringError, match="more than 4 token segments"):
        resolve(small, 4, LAYERS, max_segments=4)


def test_equal_adjacent_edits_are_one_segment(programs_made: list[int]) -> None:
    """Catches segments, and token programs, made at each of two thousand boundaries between equal edits."""
    program = compile_program([edit(0, [[0, 5]]), edit(0, [[5, None]])])
    assert len(resolve(program, 4, LAYERS, max_segments=1).segments) == 1
    programs_made.clear()
    turns = [edit(0, [[i, i + 1] for i in range(first, 2000, 2)]) for first in (0, 1)]
    program = compile_program([*turns, edit(1, [[0, None]])])
    assert [each.start for each in resolve(program, 4, LAYERS, max_segments=2).segments] == [0, 2000]
    assert len(programs_made) == 2


def test_equal_adjacent_gated_edits_write_their_own_factors() -> None:
    """Catches tokens of the second edit that write only the factor of the first, so that a trace calls it 1."""
    readouts = parse_readouts({"tone": {"probe": [1.0] * 4, "point": "post_block", "layer": 0}})
    when = {"readout": "tone", "above": 0.5}
    gated = [
        Edit(kind="add", point="post_block", layers=1, vector=[1.0] * 4, tokens=tokens, when=when)  # type: ignore[arg-type]
        for tokens in ([[4, 6]], [[6, None]])
    ]
    program = compile_program(gated, readouts=readouts)
    assert program.edits[0].digest == program.edits[1].digest
    resolved = resolve(program, 4, LAYERS)
    columns = {s.start: [gate.target for gate in s.program.gates] for s in resolved.segments if s.program}
    assert columns == {4: [program.layout.gates[0]], 6: [program.layout.gates[1]]}
    # Cache keys depend on content and not on columns, so the boundary changes none.
    assert resolved.segments[-1].kv_digest == resolved.segments[-2].kv_digest


def test_equal_edits_share_a_token_program() -> None:
    """Catches rows keyed by request: content that is equal must not take space twice."""
    first = resolve(compile_program([edit(0), edit(1, "generated")]), 5, LAYERS)
    second = resolve(compile_program([edit(0), edit(1, "generated")]), 9, LAYERS)
    assert [row.digest for row in first.token_programs] == [row.digest for row in second.token_programs]
    swapped = resolve(compile_program([edit(1, "generated"), edit(0)]), 5, LAYERS)
    assert swapped.token_programs[1].digest != first.token_programs[1].digest, "order is content"


def test_rejects_positions_before_the_prompt() -> None:
    """Catches a negative position that wraps around to the end."""
    with pytest.raises(SteeringError, match="-4"):
        resolve(compile_program([edit(0, [-4])]), 3, LAYERS)


@pytest.mark.parametrize(
    ("point", "layers", "forks"),
    [
        ("pre_attn", 2, True),
        ("attn_out", 2, False),
        ("post_attn", 2, False),
        ("mlp_in", 2, False),
        ("mlp_out", 2, False),
        ("mlp_out", 1, True),
        ("attn_out", [0, 2], True),
        ("mlp_in", "all", True),
        ("post_block", 2, False),
        ("post_attn", 1, True),
        ("post_block", [1, 2], True),
        ("post_block", "all", True),
    ],
)
def test_kv_digest_covers_edits_that_change_keys_or_values(point: str, layers: object, forks: bool) -> None:
    """Catches a cache forked for nothing, and one shared that must not be (3 layers: layer 2 is the last)."""
    resolved = resolve(compile_program([edit(0, "all", point, layers)]), 5, LAYERS)
    assert (resolved.segments[0].kv_digest is not None) is forks


@pytest.mark.parametrize("point", ["attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"])
def test_kv_digest_covers_the_last_layer_where_it_caches_more(point: str) -> None:
    """Catches a cache of convolved outputs that requests with and without an edit share, in either order."""
    program = compile_program([edit(0, "all", point, LAYERS - 1)])
    found = [resolve(program, 5, LAYERS, caches_behind_attention=more).segments[0] for more in (False, True, False)]
    assert [segment.kv_digest is not None for segment in found] == [False, True, False]


def test_all_layers_expand_in_order() -> None:
    """Catches "all" that misses the first or last layer."""
    resolved = resolve(
        compile_program([edit(0, layers="all", point="pre_attn"), edit(1, layers=2, point="pre_attn")]), 5, LAYERS
    )
    assert [i.site_number for i in resolved.token_programs[0].instructions] == [0, 6, 12, 12]


def test_wire_round_trip_and_forgeries() -> None:
    """Catches a program whose bytes were changed on the way, or made by hand."""
    program = compile_program([edit(0), edit(1, [0, [2, None]], kind="ablate")])
    data = program.to_bytes()
    assert Program.from_bytes(data) == program
    flipped = bytearray(data)
    flipped[-3] ^= 1
    for bad in (b"", b"\x00", data[:-1], bytes(flipped), "text", None, 7):
        with pytest.raises(SteeringError):
            Program.from_bytes(bad)  # type: ignore[arg-type]


@given(st.binary(max_size=200))
def test_rejects_random_bytes(data: bytes) -> None:
    """Catches any exception but ours."""
    with pytest.raises(SteeringError):
        Program.from_bytes(data)


def test_edits_of_strength_zero_are_dropped() -> None:
    """Catches a row, and a forked cache, for a request that changes nothing."""
    nothing = Edit(kind="add", point="post_block", layers=1, vector=np.ones(4), strength=0.0)
    assert resolve(compile_program([nothing]), 5, LAYERS).token_programs == ()


def test_edits_of_strength_zero_keep_their_columns() -> None:
    """Catches the column of a gated or live edit of strength 0 that another edit gets, and an edit that then runs.

    `replace` of strength 0 is not free: it rounds the stream again where that has two summands.
    """
    at_zero: dict[str, Any] = {"kind": "replace", "point": "post_block", "layers": 2, "vector": np.ones(4)}
    readouts = parse_readouts(
        {name: {"probe": np.ones(4), "point": "post_block", "layer": 0} for name in ("first", "second")}
    )
    edits = [
        Edit(**at_zero, strength=0.0, when={"readout": "first", "above": 0.0}),
        Edit(**at_zero, strength=0.5, when={"readout": "second", "below": 0.0}),
        Edit(**at_zero, strength=0.0, tokens={"between": [3, 4]}),
        Edit(**at_zero, strength=0.0, live="calm"),
        Edit(**at_zero, strength=0.0),
    ]
    program = compile_program(edits, edit_paths=[f"steering[{i}]" for i in range(len(edits))], readouts=readouts)
    assert [program.edit_source(number) for number in program.layout.gates] == [f"steering[{i}]" for i in range(3)]
    assert list(program.layout.live) == ["calm"]
    edits, readouts = program.selections
    assert edits == (program.edits[1].selector, ("steering[1]",)) and not program.selected_parts
    assert readouts[1] == ("readouts.first", "readouts.second")
    for token_program in resolve(program, 5, LAYERS).token_programs:
        run = [each for each in token_program.instructions if each.code in CODES.values()]
        assert [each.strength for each in run] == [0.5]
        assert token_program.num_instructions == len(token_program.instructions)
    # Not at the last layer, whose edits never change keys and values.
    live = resolve(compile_program([Edit(**{**at_zero, "layers": 1}, strength=0.0, live="calm")]), 5, LAYERS)
    assert [segment.kv_digest for segment in live.segments] == [None]


def test_stages_split_the_same_token_programs() -> None:
    """Catches a stage with another stage's instruction, a capture that two stages send, and books that disagree."""
    edits = [edit(0, layers="all"), edit(1, "generated", layers=[0, 2]), edit(2, [3], point="pre_attn", layers=1)]
    reads = [CaptureSpec(hooks={"post_block": "all", "pre_attn": [1]}, positions="all_prompt")]
    program = compile_program(edits, reads)
    whole, *stages = (resolve(program, 6, LAYERS, own) for own in (None, range(2), range(2, 3)))
    for stage in stages:
        assert [row.digest for row in stage.token_programs] == [row.digest for row in whole.token_programs]
        assert stage.starts == whole.starts
        assert [segment.kv_digest for segment in stage.segments] == [segment.kv_digest for segment in whole.segments]
    for rows in zip(whole.token_programs, *(stage.token_programs for stage in stages), strict=True):
        everything, *parts = ({(i.site_number, i.code, i.vector) for i in row.instructions} for row in rows)
        assert set.union(*parts) == everything
        assert sum(map(len, parts)) == len(everything)
        assert [row.num_instructions for row in rows] == [len(row.instructions) for row in rows]
        assert sum((row.captures for row in rows[1:]), ()) == rows[0].captures


def test_equal_conditions_of_several_edits_count_once() -> None:
    """Catches nine edits in the answer that count as eighteen conditions, and edits whose columns are mixed up."""
    probe = {"probe": np.ones(4), "point": "post_block", "layer": 0}
    latch = {"readout": "r", "above": 0.0, "window": "latch"}
    edit = {"kind": "add", "point": "post_block", "layers": 1, "vector": np.ones(4)}
    tokens = {"outside": [3, 4]}
    made = [{**edit, "tokens": tokens}] * 9 + [{**edit, "tokens": "generated", "when": latch}] * 3
    params = SamplingParams(readouts={"r": probe}, steering=[*made, {**edit, "tokens": tokens, "when": latch}])
    program = program_of(params)
    assert program is not None
    assert program.num_conditions == (2, 2)
    columns = list(program.layout.gates.values())
    assert [len(set(columns[:9])), len(set(columns[9:12])), len(set(columns))] == [1, 1, 3]
    assert list(program.layout.gates) == list(range(13))
    dynamic = resolve(program, 5, 2).records
    assert dynamic is not None
    assert len(dynamic.conditions) == sum(program.num_conditions)

# SPDX-License-Identifier: Apache-2.0
"""Edits and captures that no token of a request reaches: refused if known in advance, otherwise reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.answers import prompt, run
from tests.tiny import direction
from vllm_steer import Edit, SamplingParams, SteeringError
from vllm_steer.capture.hidden_states import capture_hidden_states

PROMPT = prompt(1, 2, 3, 4)
LENGTH = 4
HOOKS = {"post_block": [1]}


def add(tokens: Any, vector: Any = None, strength: float = 1.0) -> Edit:
    given = direction(1) if vector is None else vector
    return Edit(kind="add", point="post_block", layers=1, vector=given, tokens=tokens, strength=strength)


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def no_effect(output: Any) -> list[tuple[Any, ...]]:
    return [(each.edit, each.reason, each.tokens, each.choices) for each in output.steering_applied.no_effect]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"steering": [add("all"), add([500])]}, r"steering\[1\].tokens: position 500"),
        ({"steering": [add([LENGTH + 7])]}, r"steering\[0\].tokens: position 11"),
        ({"capture": {"memory": {"hooks": HOOKS, "positions": [1, 500]}}}, "capture.memory.positions: position 500"),
        ({"steering": [add([-9])]}, r"steering\[0\]\.tokens: .*before the start of a prompt of 4 tokens"),
    ],
)
def test_refuses_what_cannot_be_reached(llm: Any, fields: dict[str, Any], path: str) -> None:
    """Catches a request that is served although its edit or capture has no token to act on."""
    with pytest.raises(SteeringError, match=path):
        run(llm, [PROMPT], [greedy(**fields)])


def test_reports_edits_after_an_early_end(llm: Any) -> None:
    """Catches a digest of edits that changed nothing because the request ended first, and reports about other edits."""
    tokens = run(llm, [PROMPT], [greedy()])[0].outputs[0].token_ids
    stop = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i > 0)
    last = LENGTH + stop - 1  # the position of the last token that is run
    edits = [add([last + 1]), add([[last + 1, None]], strength=2.0), add([last], np.zeros_like(direction(1)))]
    output = run(llm, [PROMPT], [greedy(stop_token_ids=[tokens[stop]], steering=[*edits, add([-1], strength=0)])])[0]
    assert list(output.outputs[0].token_ids) == list(tokens[: stop + 1])
    assert no_effect(output) == [
        ("steering[3]", "zero_strength", None, None),
        ("steering[2]", "zero_vector", None, None),
        ("steering[0]", "unreached", [last + 1], (0,)),
        ("steering[1]", "unreached", [[last + 1, None]], (0,)),
    ]


def test_gated_edits_of_strength_zero_keep_their_place(llm: Any) -> None:
    """Catches a trace in which the gates of an edit have the place of an edit of strength 0."""
    score = {"probe": direction(1), "point": "post_block", "layer": 0}
    site = {"kind": "add", "point": "post_block", "layers": 1, "vector": direction(1), "tokens": "generated"}
    never, always = ({"readout": "score", side: bound} for side, bound in (("above", 1e9), ("below", 1e9)))
    edits = [Edit(**site, strength=0.0, when=never), Edit(**site, strength=0.0, live="calm"), Edit(**site, when=always)]
    output = run(llm, [PROMPT], [greedy(readouts={"score": score}, steering=edits)])[0]
    trace = output.outputs[0].steering_trace
    assert trace.gates.tolist() == [[0.0, 1.0]] * len(trace.positions) and len(trace.positions)
    assert trace.live["calm"].tolist() == [1.0] * len(trace.positions)
    assert no_effect(output) == [(f"steering[{number}]", "zero_strength", None, None) for number in range(2)]


def test_a_reached_edit_is_not_reported(llm: Any) -> None:
    """Catches a report about an edit at the last position that is run, which changes the last token."""
    plain, steered = run(llm, [PROMPT] * 2, [greedy(), greedy(steering=[add([LENGTH + 6], 50 * direction(1))])])
    assert no_effect(steered) == []
    assert steered.outputs[0].token_ids[:-1] == plain.outputs[0].token_ids[:-1]
    assert steered.outputs[0].token_ids[-1] != plain.outputs[0].token_ids[-1]


def test_one_generated_token_has_no_position(llm: Any) -> None:
    """Catches a decode vector that is reported as applied to a request without a decode step."""
    output = run(llm, [PROMPT], [greedy(1, decode_steering_vectors={"post_block": {1: direction(1)}})])[0]
    assert no_effect(output) == [("decode_steering_vectors.post_block[1]", "unreached", "generated", (0,))]


def test_samples_are_reported_one_by_one(llm: Any) -> None:
    """Catches the report of one sample for all: samples end at tokens of their own."""
    sampling: dict[str, Any] = {"temperature": 2.0, "seed": 0, "max_tokens": 12, "n": 6}
    first = run(llm, [PROMPT], [SamplingParams(ignore_eos=True, **sampling)])[0]
    stop = [sample.token_ids[2] for sample in first.outputs[:2]]
    params = SamplingParams(
        ignore_eos=True, stop_token_ids=stop, steering=[add([LENGTH + 4], 1e-6 * direction(1))], **sampling
    )
    output = run(llm, [PROMPT], [params])[0]
    short = tuple(sample.index for sample in output.outputs if len(sample.token_ids) < 6)
    assert 2 <= len(short) < 6
    assert no_effect(output) == [("steering[0]", "unreached", [LENGTH + 4], short)]


def test_modules_and_global_steering_are_reported(llm: Any) -> None:
    """Catches a module that is refused for short requests, and one that is reported as applied."""
    llm.steering.register("late", edits=[add([50])])
    llm.steering.set(edits=[add([60])])
    try:
        output = run(llm, [PROMPT], [greedy(steering_modules=["late", ("late", 0.0)])])[0]
    finally:
        llm.steering.clear()
        llm.steering.delete("late")
    assert no_effect(output) == [
        ("steering_modules[1]", "zero_strength", None, None),
        ("global steering", "unreached", [60], (0,)),
        ("steering_modules[0]", "unreached", [50], (0,)),
    ]


@pytest.mark.parametrize(
    ("positions", "status", "unreached"),
    [
        ([LENGTH + 3], "partial", (LENGTH + 3,)),
        ([1, LENGTH + 3], "ok", (LENGTH + 3,)),
        ([[1, LENGTH + 4]], "ok", ([LENGTH + 2, LENGTH + 4],)),
        ([[LENGTH + 3, None]], "partial", ([LENGTH + 3, None],)),
        ([[1, None]], "ok", ()),
        ("all", "ok", ()),
    ],
)
def test_captures_list_unreached_positions(llm: Any, positions: Any, status: str, unreached: Any) -> None:
    """Catches an empty capture with status `ok`, and positions without rows that are not listed."""
    tokens = run(llm, [PROMPT], [greedy()])[0].outputs[0].token_ids
    assert tokens[2] not in tokens[:2]
    capture = {"memory": {"hooks": HOOKS, "positions": positions}}
    output = run(llm, [PROMPT], [greedy(stop_token_ids=[tokens[2]], capture=capture)])[0]
    result = output.capture_results["memory"]
    assert (result.status, result.unreached, result.data.unreached) == (status, unreached, unreached)
    assert (result.error is None) == (status == "ok")
    if status == "partial":
        assert (
            result.error == f"positions {unreached[0]} were not reached; the last position with a row is {LENGTH + 1}"
        )
    assert set(result.positions("post_block", 1).tolist()) <= set(range(LENGTH + 2))


def test_generated_rows_of_one_token(llm: Any) -> None:
    """Catches a complete capture of no generated rows that is reported as a failure, or without a word."""
    result = run(llm, [PROMPT], [greedy(1, capture={"memory": {"hooks": HOOKS, "positions": "all_generated"}})])[0]
    memory = result.capture_results["memory"]
    assert (memory.status, memory.unreached) == ("ok", ([LENGTH, None],))


@pytest.mark.parametrize("positions", ["all_generated", [[1, 50]]])
def test_hidden_states_raise_for_missing_rows(llm: Any, positions: Any) -> None:
    """Catches hidden states of fewer tokens than were asked for."""
    with pytest.raises(RuntimeError, match="no rows at positions"):
        capture_hidden_states(llm, [PROMPT], hooks=HOOKS, positions=positions, use_tqdm=False)
    rows = capture_hidden_states(llm, [PROMPT], hooks=HOOKS, positions=[[1, None]], use_tqdm=False)
    assert torch.equal(rows.positions("post_block", 1), torch.tensor([1, 2, 3]))

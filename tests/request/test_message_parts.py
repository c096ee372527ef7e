# SPDX-License-Identifier: Apache-2.0
"""Selectors of parts of a conversation, and conditions that look at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_steer import CaptureSpec, Edit, SamplingParams, Selector, SteeringError
from vllm_steer.registry.module import parse_module
from vllm_steer.request.selector import OPEN_END

VECTOR = np.ones(4)
READOUTS = {"r": {"probe": VECTOR, "point": "post_block", "layer": 0}}


@pytest.mark.parametrize(
    "tokens",
    ["thinking", "answer", "tool_call", "image", {"between": [3, "<x>"]}, {"outside": "tool_call", "opened": True},
     {"generated": [0, [4, 9], [20, None]]}],
)  # fmt: skip
def test_wire_form_round_trips(tokens: Any) -> None:
    """Catches a part that is another one after a change of process."""
    selector = Selector(tokens)
    assert Selector.from_wire(selector.to_wire()) == selector
    assert hash(Selector.from_wire(selector.to_wire())) == hash(selector)


def test_positions_count_from_the_first_generated_token() -> None:
    """Catches positions that count from the prompt, or from the last prompt token."""
    assert Selector({"generated": [0, [4, 9], [20, None]]}).intervals(7) == ((7, 8), (11, 16), (27, OPEN_END))
    assert Selector({"generated": [0, 1, 2]}).num_positions == 3


@pytest.mark.parametrize(
    ("tokens", "field", "words"),
    [
        ("developer", "t", "system, user, assistant"),
        ({"between": [3, 3]}, "t.between", "both begin and end"),
        ({"between": [[3, 4], 5]}, "t.between[0]", "several tokens"),
        ({"between": [3]}, "t.between", "a start and an end token"),
        ({"between": [3, -1]}, "t.between[1]", "token id"),
        ({"between": "answer"}, "t.between", "thinking"),
        ({"between": [3, 4], "outside": [3, 4]}, "t", "exactly one of .*; it has between and outside"),
        ({"between": [3, 4], "opened": 1}, "t.opened", "true or false"),
        ({"between": [3, 4], "end": 1}, "t", "unknown key"),
        ({"generated": [-1]}, "t.generated[0]", "0 or more"),
        ({"generated": [3], "between": [3, 4]}, "t", "generated without any other key"),
        ({"generated": 3}, "t.generated", "list"),
    ],
)
def test_selectors_refused(tokens: Any, field: str, words: str) -> None:
    """Catches a part that is read as another one."""
    with pytest.raises(SteeringError, match=words) as caught:
        Selector(tokens, "t")
    assert caught.value.field == field


def condition(**fields: Any) -> dict[str, Any]:
    return {"readout": "r", "above": 0.0, **fields}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"when": condition(positions="answer")}, "when.positions", "edit's tokens"),
        ({"when": condition(positions="answer", window="prompt")}, "when.positions", 'window "previous" or "latch"'),
        ({"when": condition(positions=[[0, 3]], window="latch")}, "when.positions", "part of the output"),
        ({"when": condition(positions="answer", window="previous", over="mean")}, "when.positions", "mean"),
        ({"when": condition(window="latch"), "tokens": "image"}, "when.window", "generated tokens only"),
    ],
)
def test_conditions_refused(fields: dict[str, Any], field: str, words: str) -> None:
    """Catches windows that cannot be decided in a part."""
    with pytest.raises(SteeringError, match=words) as caught:
        SamplingParams(
            readouts=READOUTS,
            steering=[{"kind": "add", "point": "post_block", "layers": 1, "vector": VECTOR, **fields}],
        )
    assert caught.value.field == f"steering[0].{field}"


def test_stops_captures_and_modules_refused() -> None:
    """Catches positions of a stop that are ignored, and parts where nothing decides about them."""
    with pytest.raises(SteeringError, match="part of the output") as caught:
        SamplingParams(readouts=READOUTS, stop_on=[condition(positions="all")])
    assert caught.value.field == "stop_on[0].positions"
    for positions in (Selector("answer"), {"between": [3, 4]}):
        with pytest.raises(SteeringError, match="captures"):
            CaptureSpec(hooks={"post_block": 0}, positions=positions)
    assert CaptureSpec(hooks={"post_block": 0}, positions={"generated": [2]}).tokens.intervals(5) == ((7, 8),)
    for tokens in ("answer", "image"):
        edit = Edit(kind="add", point="post_block", layers=0, vector=VECTOR, tokens=tokens)
        with pytest.raises(SteeringError, match="not in modules") as caught:
            parse_module({"edits": [edit]})
        assert caught.value.field == "edits[0].tokens"

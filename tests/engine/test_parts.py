# SPDX-License-Identifier: Apache-2.0
"""Edits, conditions, stops and readouts in parts of the output, against a token-by-token reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import hf
from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.engine.conftest import opened
from tests.engine.crowded import crowded_engine
from tests.engine.record_cases import READOUTS, add, bounds_of, check_all, expect, run_all
from tests.engine.record_reference import Expected, Reference
from vllm_steer import SteeringError
from vllm_steer.engine.record_keeper import RecordKeeper
from vllm_steer.frontend.context import engine_context
from vllm_steer.frontend.roles import RoleTokens
from vllm_steer.request.message_parts import ROLES
from vllm_steer.taps import records as step_records

GENERATED = 24
PARTS = {"thinking": [3, 4], "tool_call": [5, 6]}
PROMPTS = [np.random.default_rng(i).integers(10, 120, 6 + 5 * i).tolist() for i in range(5)]
# The prompt opens a part, has closed it, or has closed another one.
PROMPTS[1] += [3, 9]
PROMPTS[2] += [3, 11, 4]
PROMPTS[3] += [3, 5, 12, 6]
SMALL = {"max_model_len": 128, "max_num_seqs": 48, "steering_config": {"parts": PARTS}}

Truth = tuple[dict[str, dict[str, Any]], dict[tuple[str, int], Expected], dict[int, float]]


def cases(bounds: dict[str, tuple[float, float]]) -> dict[str, dict[str, Any]]:
    early, late = bounds["early"], bounds["late"]
    high = {"readout": "late", "above": late[0]}
    return {
        "thinking": {"edits": [add(tokens="thinking")]},
        "answer": {"edits": [add(tokens="answer")]},
        "tool call": {"edits": [add(tokens="tool_call")]},
        "outside of tool calls": {"edits": [add(tokens={"outside": "tool_call"})]},
        "opened": {"edits": [add(tokens={"between": [5, 4], "opened": True})]},
        "from the fifth on": {"edits": [
            add(tokens={"generated": [[4, None]]}, when={"readout": "early", "above": -99})]},
        "gated": {"edits": [add(tokens={"outside": [3, 6]}, when={"readout": "early", "above": early[0]})]},
        "several": {"edits": [add(tokens="thinking"), add(layer=1, seed=7, tokens="answer", kind="ablate")]},
        "latch": {"edits": [add(layer=1, tokens="answer", when={**high, "window": "latch", "positions": "thinking"})]},
        "previous": {"edits": [add(layer=1, when={**high, "window": "previous", "positions": {"outside": [3, 4]}})]},
        "max": {"edits": [
            add(layer=1, when={"readout": "late", "below": late[1], "window": "previous", "over": "max",
                               "positions": "thinking"})]},
        "ema": {"edits": [
            add(layer=1, when={**high, "window": "previous", "over": "ema", "alpha": 0.5, "positions": "thinking"})]},
        "in a row": {"edits": [
            add(layer=1, when={**high, "window": "previous", "tokens": 2, "positions": "answer"})]},
        "stop": {"stops": [{"readout": "late", "above": late[0], "positions": "answer", "tokens": 2}]},
    }  # fmt: skip


@pytest.fixture(scope="module")
def truth(tiny_llama: Path) -> Truth:
    """Return the cases, what the reference does with each prompt, and the bias with which markers are generated."""
    model = hf.load(tiny_llama)
    reference = Reference(model, model.model.layers, PARTS)
    reference.run(PROMPTS[0], 1, READOUTS)
    bias = {token: 1.5 * float(reference._logits.std()) for pair in PARTS.values() for token in pair}
    made = cases(bounds_of(reference))
    return made, expect(reference, made, PROMPTS, generated=GENERATED, bias=bias), bias


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Any]:
    with opened(tiny_llama, **SMALL) as engine:
        yield engine


def run_cases(llm: Any, truth: Truth, names: Any) -> None:
    made = {name: truth[0][name] for name in names}
    check_all(run_all(llm, made, PROMPTS, generated=GENERATED, logit_bias=truth[2]), truth[1], PROMPTS)


def test_cases_are_decided(truth: Truth) -> None:
    """Catches cases that decide nothing: parts that never begin or end, gates that never change."""
    for name in truth[0]:
        found = [truth[1][name, number] for number in range(len(PROMPTS))]
        assert min((margin for each in found for margin in each.margins), default=1.0) > 2e-5, name
        values = {
            float(factor)
            for each, tokens in zip(found, PROMPTS, strict=True)
            for factor in each.factors[len(tokens) :].ravel()
        }
        assert len(values) > 1 or any(each.stop for each in found) or name == "from the fifth on", name


def test_parts_equal_the_reference(llm: Any, truth: Truth) -> None:
    """Catches a part of another request, one that a prompt opens and is forgotten, and a boundary at another token."""
    run_cases(llm, truth, truth[0])


def test_comparison_detects_a_late_boundary(llm: Any, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: parts that begin one token after their start token must be noticed."""
    real = step_records._inside_span

    def late(layout: Any, field: Any, state: Any, request: Any) -> Any:
        starts, *_ = step_records._markers(layout.token, field, request)
        return real(layout, field, state, request) & ~starts

    monkeypatch.setattr(step_records, "_inside_span", late)
    with pytest.raises(AssertionError):
        run_cases(llm, truth, ["thinking"])


def test_comparison_detects_a_forgotten_state(llm: Any, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the state behind earlier steps, a part ends after its start token."""
    real = step_records._inside_span
    monkeypatch.setattr(
        step_records, "_inside_span", lambda layout, field, state, *rest: real(layout, field, state * 0, *rest)
    )
    with pytest.raises(AssertionError):
        run_cases(llm, truth, ["thinking"])


def test_readouts_of_a_part(llm: Any, truth: Truth) -> None:
    """Catches values of tokens outside of the part."""
    readouts = {
        "all": {**READOUTS["late"], "positions": "all"},
        "part": {**READOUTS["late"], "positions": "answer"},
        "late_tokens": {**READOUTS["late"], "positions": {"generated": [[20, None]]}},
    }
    wanted = params(GENERATED, logprobs=None, readouts=readouts, logit_bias=truth[2])
    outputs = run(llm, [prompt(*tokens) for tokens in PROMPTS], [wanted] * len(PROMPTS))
    counts = set()
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        found = output.outputs[0].readouts
        sequence, inside, positions = tokens + tokens_of(output), {"thinking": False, "tool_call": False}, []
        for position, token in enumerate(sequence[:-1]):
            before = dict(inside)
            for name, (start, end) in PARTS.items():
                inside[name] = (inside[name] or token == start) and token != end
            if token == PARTS["tool_call"][0]:
                inside["thinking"] = before["thinking"] = False
            if position >= len(tokens) and not any(before[name] or inside[name] for name in PARTS):
                positions.append(position)
        assert found["part"].positions.tolist() == positions
        np.testing.assert_array_equal(found["part"].values, found["all"].values[positions])
        late = list(range(len(tokens) + 20, len(sequence) - 1))
        assert found["late_tokens"].positions.tolist() == late
        counts.add(len(positions))
    assert len(counts) > 1


def test_messages_of_the_prompt(llm: Any, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches messages whose positions do not reach the engine or captured rows, and an answer outside its message."""
    tokens = [7, 3, 20, 21, 8, 30, 7, 4, 22, 8, 7, 5]
    roles = RoleTokens(
        {"system": (7, 3), "user": (7, 4), "assistant": (7, 5)}, dict.fromkeys(ROLES, 8), frozenset([7]), {}
    )
    markers = engine_context(llm.llm_engine).markers
    monkeypatch.setattr(markers, "_role_tokens", roles)
    monkeypatch.setattr(markers, "_no_roles", None)
    readouts = {
        "user": {**READOUTS["late"], "positions": "user"},
        "rest": {**READOUTS["late"], "positions": "assistant"},
    }
    places = ([[0, 5]], [[6, 10]], [[10, None]])

    def rows_at(positions: Any) -> dict[str, Any]:
        return {"memory": {"hooks": {"post_block": [1]}, "positions": positions}}

    named = [params(8, readouts=readouts, steering=[add(tokens=role)], capture=rows_at(role)) for role in ROLES]
    listed = [params(8, steering=[add(tokens=place)], capture=rows_at(place)) for place in places]
    outputs = run(llm, [prompt(*tokens)] * 7, [*named, *listed, params(8)])
    for got, expected in zip(outputs[:3], outputs[3:6], strict=True):
        assert np.array_equal(logprobs_of(got), logprobs_of(expected))
        assert not np.array_equal(logprobs_of(got), logprobs_of(outputs[6]))
        found = got.outputs[0].readouts
        assert found["user"].positions.tolist() == [6, 7, 8, 9]
        assert found["rest"].positions.tolist() == list(range(10, 12 + 8 - 1))
        rows, wanted = (each.outputs[0].capture_results["memory"] for each in (got, expected))
        assert rows.status == "ok"
        assert rows.positions("post_block", 1).tolist() == wanted.positions("post_block", 1).tolist()
        assert rows.tensor("post_block", 1).equal(wanted.tensor("post_block", 1))


@pytest.mark.feature("prefix caching", "react")
def test_cached_blocks_of_a_part_are_not_shared(llm: Any, truth: Truth) -> None:
    """Catches KV of an edited answer that serves a request whose edit is in another part, or none."""
    whole = prompt(*PROMPTS[4])
    edits = [add(layer=0, tokens=part) for part in ("answer", "thinking")]
    first = run(llm, [whole], [params(GENERATED, logprobs=None, steering=[edits[0]], logit_bias=truth[2])])[0]
    longer = prompt(*PROMPTS[4], *tokens_of(first), *range(40, 50))
    cached = [run(llm, [longer], [params(4, steering=[edit])])[0] for edit in edits]
    fresh = [run(llm, [longer], [params(4, steering=[edit], skip_reading_prefix_cache=True)])[0] for edit in edits]
    for got, expected in zip(cached, fresh, strict=True):
        assert tokens_of(got) == tokens_of(expected)


def test_parts_without_a_token_are_reported(llm: Any, truth: Truth) -> None:
    """Catches an edit of a part that never began, reported as applied, and reports about parts with a token."""
    selectors = ["thinking", "answer", "tool_call", {"between": [5, 6]}, {"outside": [3, 4]}]
    edits = [add(tokens=each) for each in selectors]
    # The prompt opens thinking; no marker is generated.
    fields = {"logit_bias": dict.fromkeys([3, 4, 5, 6], -100.0), "logprobs": None}
    tokens = [*PROMPTS[0], 3, 9]
    output = run(llm, [prompt(*tokens)], [params(6, steering=edits, **fields)])[0]
    found = [(each.edit, each.reason, each.tokens) for each in output.steering_applied.no_effect]
    assert output.outputs[0].steering_trace.gates.shape[1] == len(edits)
    unreached = {f"steering[{i}]": edit.tokens.to_wire() for i, edit in enumerate(edits) if i}
    assert found == [(path, "unreached", tokens) for path, tokens in unreached.items()]
    # The trace has a column for each edit: 0 at every token for those in the report, and for no other.
    gates = output.outputs[0].steering_trace.gates
    assert [not column.any() for column in gates.T] == [False, True, True, True, True]
    # Stops, readouts and conditions of a part are reported as edits are.
    probe, bound = READOUTS["late"], {"readout": "late", "above": -1e9}
    wanted = params(
        6,
        readouts={"late": {**probe, "positions": "last_prompt"}, "seen": {**probe, "positions": "answer"}},
        stop_on=[{**bound, "positions": "answer"}, {**bound, "tokens": 99}],
        steering=[
            add(layer=1, when=[{**bound, "window": "latch", "positions": part} for part in ("answer", "thinking")])
        ],
        **fields,
    )
    missed = run(llm, [prompt(*tokens)], [wanted])[0].steering_applied.no_effect
    assert [(each.edit, each.tokens) for each in missed] == [
        ("steering[0].when[0]", "answer"), ("readouts.seen", "answer"), ("stop_on[0]", "answer"),
    ]  # fmt: skip
    # A stop looks at generated tokens that ran through the model; of one token to generate, none does.
    once = params(1, readouts={"late": {**probe, "positions": "all"}}, stop_on=[bound])
    (note,) = run(llm, [prompt(*tokens)], [once])[0].steering_applied.no_effect
    assert (note.edit, note.tokens) == ("stop_on[0]", "generated")
    closed = run(llm, [prompt(*tokens, 4)], [params(6, steering=edits, **fields)])[0]
    assert [each.edit for each in closed.steering_applied.no_effect] == ["steering[0]", "steering[2]", "steering[3]"]


@pytest.fixture(scope="module")
def crowded(tiny_llama: Path) -> Iterator[tuple[Any, list[Any]]]:
    with crowded_engine(tiny_llama, max_num_batched_tokens=24, **{**SMALL, "max_num_seqs": 12}) as crowd:
        yield crowd


@pytest.mark.feature("preemption", "react")
@pytest.mark.feature("chunked prefill", "react")
def test_preemption_and_chunked_prefill(crowded: tuple[Any, list[Any]], truth: Truth) -> None:
    """Catches a part that is forgotten in a preemption or decided again from other tokens."""
    engine, preempted = crowded
    run_cases(engine, truth, truth[0])
    assert preempted


def test_comparison_detects_a_missing_replay(
    crowded: tuple[Any, list[Any]], truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the generated tokens, the part of a resumed request is wrong."""
    real = RecordKeeper._replay

    def empty(self: Any, *args: Any) -> Any:
        replay = real(self, *args)
        if replay is not None:
            replay.generated[:] = 0
        return replay

    monkeypatch.setattr(RecordKeeper, "_replay", empty)
    with pytest.raises(AssertionError):
        run_cases(crowded[0], truth, truth[0])


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"steering": [add(tokens={"between": [3, "<think>"]})]}, "steering[0].tokens", "no tokenizer"),
        ({"steering": [add(tokens="image")]}, "steering[0].tokens", "the prompt has none"),
    ],
)
def test_refused_with_the_prompt(llm: Any, fields: dict[str, Any], path: str, words: str) -> None:
    """Catches parts that cannot be decided for a prompt and are ignored."""
    with pytest.raises(SteeringError, match=words) as caught:
        run(llm, [prompt(1, 2, 3)], [params(2, **fields)])
    assert caught.value.field == path

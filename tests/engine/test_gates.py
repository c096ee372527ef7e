# SPDX-License-Identifier: Apache-2.0
"""Gates and stops of requests against a token-by-token reference in HF Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import hf
from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.crowded import crowded_engine
from tests.engine.record_cases import (
    GENERATED,
    PROMPTS,
    READOUTS,
    add,
    bounds_of,
    cases,
    check_all,
    check_consistent,
    expect,
    reacting,
    request,
    run_all,
)
from tests.engine.record_reference import Expected, Reference
from vllm_steer.engine.record_keeper import RecordKeeper
from vllm_steer.taps import records as step_records

Truth = tuple[dict[str, dict[str, Any]], dict[tuple[str, int], Expected]]


@pytest.fixture(scope="module")
def truth(tiny_llama: Path) -> Truth:
    """Return the cases and what the reference does with each prompt."""
    model = hf.load(tiny_llama)
    reference = Reference(model, model.model.layers)
    made = cases(bounds_of(reference))
    return made, expect(reference, made)


def test_cases_are_decided(truth: Truth) -> None:
    """Catches cases that decide nothing: gates that never change, stops that never fire, scores at a bound."""
    for name in truth[0]:
        found = [truth[1][name, number] for number in range(len(PROMPTS))]
        assert min((margin for each in found for margin in each.margins), default=1.0) > 2e-5, name
        values = {round(float(factor), 3) for each in found for factor in each.factors.ravel()}
        assert len(values) > 1 or any(each.stop for each in found), name


@pytest.mark.feature("continuous batching", "react")
def test_every_window_and_stop(llm: Any, truth: Truth) -> None:
    """Catches a gate of another token, a forgotten state, a stop that is late, and decisions of another request."""
    check_all(run_all(llm, truth[0]), truth[1])


def test_adjacent_ranges_trace_as_one(llm: Any, truth: Truth) -> None:
    """Catches a trace that calls a gate open at tokens where it was closed, behind an equal edit of the tokens before.

    The probe is first below its bound at every token, then at some.
    """
    for high, closed in ((1e6, True), (truth[0]["token"]["edits"][0].when[0].above, False)):
        when = {"readout": "early", "above": high}
        start = len(PROMPTS[1])
        whole, *parts = ([[start + 1, None]], [[start + 1, start + 5]], [[start + 5, None]])
        one = {"edits": [add(when=when, tokens=whole)]}
        two = {"edits": [add(when=when, tokens=tokens) for tokens in parts]}
        outputs = run_all(llm, {"one": one, "two": two}, [PROMPTS[1]])
        expected, found = (outputs[name, 0].outputs[0] for name in ("one", "two"))
        assert found.token_ids == expected.token_ids
        gates = expected.steering_trace.gates[:, 0]
        assert (not gates.any()) == closed
        np.testing.assert_array_equal(found.steering_trace.gates.sum(axis=1), gates)


def test_the_token_that_stops_is_captured(llm: Any, truth: Truth) -> None:
    """Catches a capture without the row of the token that ends the request, or with the row of another token.

    The steps of an engine with asynchronous scheduling are tested on GPUs only.
    """
    (stop,) = truth[0]["stop"]["stops"]
    capture = {"memory": {"hooks": {"post_block": [0]}, "positions": "all_generated"}}
    ended = 0
    for number, output in run_all(llm, {"stop": truth[0]["stop"]}, capture=capture).items():
        sample, found = output.outputs[0], output.outputs[0].capture_results["memory"]
        positions = found.positions("post_block", 0).tolist()
        values = sample.readouts[stop["readout"]]
        assert (found.status, found.unreached if positions else ()) == ("ok", ()), number
        assert [p for p in values.positions.tolist() if p >= len(output.prompt_token_ids)] == positions
        scores = found.tensor("post_block", 0).numpy() @ READOUTS[stop["readout"]]["probe"]
        np.testing.assert_allclose(scores, values.values[len(output.prompt_token_ids) :], atol=2e-3)
        if sample.finish_reason == "stop" and positions:
            ended += 1
            assert sample.stop_reason.endswith(f"at position {positions[-1]}")
    assert ended


@pytest.mark.parametrize("least", [0, 1, 2, 5, GENERATED])
def test_stops_wait_for_min_tokens(llm: Any, least: int) -> None:
    """Catches a stop that ends a request ahead of its `min_tokens`; the condition holds at every token."""
    stop = {"readout": "early", "above": -1e6}
    for output in run_all(llm, {"stop": {"stops": [stop]}}, min_tokens=least).values():
        sample, start = output.outputs[0], len(output.prompt_token_ids)
        count = max(least, 1)
        assert len(sample.token_ids) == count
        if count == GENERATED:
            assert sample.finish_reason == "length"
        else:
            assert sample.stop_reason.endswith(f"at position {start + count - 1}")
            assert sample.readouts["early"].positions.tolist() == list(range(start + count))


def test_comparison_detects_a_late_gate(llm: Any, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a state that is folded one step late must be noticed."""
    from vllm_steer.engine.worker_manager import WorkerSteeringManager

    real = WorkerSteeringManager._begin_records

    def late(self: Any, *args: Any) -> None:
        now = self.tables.carry.clone()
        self.tables.carry.copy_(getattr(self, "_old", now))
        real(self, *args)
        self.tables.carry.copy_(now)
        self._old = now

    monkeypatch.setattr(WorkerSteeringManager, "_begin_records", late)
    with pytest.raises(AssertionError):
        check_all(run_all(llm, {"previous": truth[0]["previous"]}), truth[1])


def test_comparison_detects_a_forgotten_latch(llm: Any, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a latch that only looks at the last token must be noticed."""
    monkeypatch.setattr(step_records, "LATCH", 99)
    with pytest.raises(AssertionError):
        check_all(run_all(llm, {"latch": truth[0]["latch"]}), truth[1])


def test_comparison_detects_a_late_stop(llm: Any, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a stop that takes effect with the next step must be noticed."""
    real = RecordKeeper.receive

    def late(self: Any, output: Any) -> Any:
        before, self._fired = getattr(self, "_fired", {}), real(self, output)
        return before

    monkeypatch.setattr(RecordKeeper, "receive", late)
    with pytest.raises(AssertionError):
        check_all(run_all(llm, {"stop": truth[0]["stop"]}), truth[1])


@pytest.fixture(scope="module")
def crowded(tiny_llama: Path, llm: Any) -> Iterator[tuple[Any, list[Any]]]:
    with crowded_engine(tiny_llama, max_num_batched_tokens=24, max_num_seqs=12) as crowd:
        yield crowd


@pytest.mark.feature("preemption", "react")
@pytest.mark.feature("chunked prefill", "react")
def test_preemption_and_chunked_prefill(crowded: tuple[Any, list[Any]], truth: Truth) -> None:
    """Catches state that is lost with a chunk, in a preemption, or behind a prefix-cache hit."""
    engine, preempted = crowded
    check_all(run_all(engine, truth[0]), truth[1])
    assert preempted


@pytest.mark.feature("prefix caching", "react")
def test_gated_blocks_are_shared_by_equal_requests_only(crowded: tuple[Any, list[Any]], truth: Truth) -> None:
    """Catches a block of another gate, and decisions of a cached prompt that are assumed."""
    engine, _ = crowded
    names = ("previous", "latch", "token", "token, below, of the prompt", "prompt, mean", "several")
    cached = 0
    for _ in range(2):
        for number in (4, 5):
            for name in names:
                wanted = request(truth[0][name], positions="all_generated")
                (output,) = run(engine, [prompt(*PROMPTS[number])], [wanted])
                cached += output.num_cached_tokens
                expected = truth[1][name, number]
                assert tokens_of(output) == expected.tokens, (name, number)
                gates, start = output.outputs[0].steering_trace.gates, len(PROMPTS[number])
                np.testing.assert_allclose(gates, expected.factors[start : start + len(gates)], atol=2e-2)
    assert cached


@pytest.mark.feature("several samples (`n > 1`)", "react")
def test_each_sample_decides_for_itself(crowded: tuple[Any, list[Any]]) -> None:
    """Catches state that the samples of a request share."""
    engine, _ = crowded
    wanted = params(20, n=3, temperature=1.5, logprobs=None, **reacting())
    outputs = run(engine, [prompt(*each) for each in PROMPTS], [wanted] * len(PROMPTS))
    samples = [(output, sample) for output in outputs for sample in output.outputs]
    for output, sample in samples:
        check_consistent(sample, len(output.prompt_token_ids))
    assert any(sample.finish_reason == "stop" for _, sample in samples)
    assert len({tuple(sample.token_ids) for _, sample in samples}) > len(outputs)
    # Negative control: decisions of another sample are noticed.
    with pytest.raises(AssertionError):
        for (output, sample), (_, other) in pairwise(samples):
            sample.steering_trace = other.steering_trace
            check_consistent(sample, len(output.prompt_token_ids))


def test_preempted_requests_repeat_their_decisions(
    crowded: tuple[Any, list[Any]], truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a decision that is made again: recorded factors must come back even if the readouts have changed."""
    engine, _ = crowded
    names = ("previous", "latch", "token")
    changed: list[str] = []
    real = RecordKeeper._replay

    def inverted(self: Any, request_id: str, forwarded: int) -> Any:
        replay = real(self, request_id, forwarded)
        if replay is not None:
            replay.records[:, 3] = 1.0 - replay.records[:, 3]
            changed.append(request_id)
        return replay

    monkeypatch.setattr(RecordKeeper, "_replay", inverted)
    outputs = run_all(engine, {name: truth[0][name] for name in names})
    assert changed
    with pytest.raises(AssertionError):
        check_all(outputs, truth[1])


def test_comparison_detects_a_missing_replay(
    crowded: tuple[Any, list[Any]], truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the records, the state of a resumed request is wrong."""
    engine, _ = crowded
    monkeypatch.setattr(RecordKeeper, "_replay", lambda *_: None)
    names = ("latch", "previous", "latch, release", "prompt, mean")
    with pytest.raises(AssertionError):
        check_all(run_all(engine, {name: truth[0][name] for name in names}), truth[1])

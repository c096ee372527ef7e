# SPDX-License-Identifier: Apache-2.0
"""Live strengths that change while a request runs, against the token-by-token reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import envs

from tests.engine import hf
from tests.engine.answers import finish, params, prompt, tokens_of
from tests.engine.record_cases import GENERATED, PROMPTS, READOUTS, add
from tests.engine.record_reference import Reference
from vllm_steer import SteeringError
from vllm_steer.engine.live_strengths import ENDED, LiveStrengths
from vllm_steer.frontend.live import EndedRequestError, samples_of

CHANGES: Mapping[int, float] = {2: 0.0, 5: -1.0, 9: 2.5}
"""New strength after a number of steps."""


def drive(llm: Any, numbers: list[int]) -> tuple[dict[str, Any], dict[int, float]]:
    """Run requests by steps, change the first one's strength, and return outputs and changes by position."""
    edits = [add(layer=1, live="calm"), add(layer=2, seed=7, strength=0.5)]
    engine = llm.llm_engine
    for number in numbers:
        engine.add_request(
            str(number), prompt(*PROMPTS[number]), params(GENERATED, logprobs=None, readouts=READOUTS, steering=edits)
        )
    outputs, changed = {}, {}
    for step in range(100):
        if step in CHANGES:
            position = llm.set_strength(str(numbers[0]), calm=CHANGES[step])
            changed[position] = CHANGES[step]
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        if not engine.has_unfinished_requests():
            break
    return outputs, changed


def check_changes(reference: Reference, outputs: dict[str, Any], changed: dict[int, float], number: int) -> None:
    """Compare the output of a request of :func:`drive` with the reference; ``changed`` holds for this request."""

    def live(position: int) -> dict[str, float]:
        past = [changed[start] for start in sorted(changed) if start <= position]
        return {"calm": past[-1] if past else 1.0}

    edits = [add(layer=1, live="calm"), add(layer=2, seed=7, strength=0.5)]
    expected = reference.run(PROMPTS[number], GENERATED, READOUTS, edits, live=live)
    output = outputs[str(number)]
    assert tokens_of(output) == expected.tokens, number
    trace = output.outputs[0].steering_trace
    np.testing.assert_array_equal(trace.live["calm"], [live(p)["calm"] for p in trace.positions.tolist()])


def test_changes_hold_from_the_reported_position(llm: Any, tiny_llama: Path) -> None:
    """Catches a change that takes effect at another token, or for another request, and a trace without it."""
    numbers = [1, 3, 4]
    outputs, changed = drive(llm, numbers)
    assert len(changed) == len(CHANGES)
    model = hf.load(tiny_llama)
    reference = Reference(model, model.model.layers)
    for number in numbers:
        check_changes(reference, outputs, changed if number == numbers[0] else {}, number)


@pytest.mark.parametrize("tokens", [{"generated": [[4, None]]}, {"generated": [[0, 3]]}])
def test_a_request_alone_has_positions_and_a_trace(llm: Any, tokens: Any) -> None:
    """Catches tokens outside of the edit's without a trace, and a change from position 0 that holds from a later one.

    No other request is in the batch, so the steps of these tokens run without edits.
    """
    length, generated = 5, 8
    engine = llm.llm_engine
    engine.add_request(
        "alone",
        prompt(*range(1, length + 1)),
        params(generated, logprobs=None, steering=[add(live="calm", tokens=tokens)]),
    )
    changed: list[int] = []
    while engine.has_unfinished_requests():
        changed.append(llm.set_strength("alone", calm=float(len(changed))))
        (output,) = engine.step()
    # The last generated token does not run through the model.
    positions = list(range(length, length + generated - 1))
    assert changed == [0, *positions]
    trace = output.outputs[0].steering_trace
    assert trace.positions.tolist() == positions
    assert trace.live["calm"].tolist() == [float(changed.index(position)) for position in positions]


@pytest.mark.parametrize(
    ("request_id", "strengths", "field"),
    [
        ("nobody", {"calm": 1.0}, "request_id"),
        ("one", {"clam": 1.0}, "clam"),
        ("one", {"calm": float("nan")}, "calm"),
        ("one", {}, "strengths"),
    ],
)
def test_refused(llm: Any, request_id: str, strengths: dict[str, float], field: str) -> None:
    """Catches a change that is accepted and has no effect."""
    engine = llm.llm_engine
    engine.add_request("one", prompt(1, 2, 3), params(3, steering=[add(live="calm")]))
    with pytest.raises(SteeringError) as refused:
        llm.set_strength(request_id, **strengths)
    assert refused.value.field == field
    finish(engine)


def test_changes_that_overflow_together(llm: Any) -> None:
    """Catches rows of NaN after two changes, and a change that is refused for a strength that is 0 by now."""
    engine, edits = llm.llm_engine, [add(layer=1, live="a"), add(layer=2, live="b")]
    most = 1.5e19 / float(np.linalg.norm(edits[0].vector))
    engine.add_request("one", prompt(1, 2, 3), params(3, steering=edits))
    llm.set_strength("one", a=most)
    with pytest.raises(SteeringError, match=r"2 edits of one token may add a norm of 3e\+19") as refused:
        llm.set_strength("one", b=most)
    assert refused.value.field == "b"
    llm.set_strength("one", a=0.0)
    llm.set_strength("one", b=most)
    llm.set_strength("one", b=0.0)
    finish(engine)


def live_ids(engine: Any, request_id: str) -> list[str]:
    """Return the engine's ids of the live strengths of a running request."""
    return [each.live_id for each in samples_of(engine.output_processor, request_id)]


def test_worker_reports_preempted_and_ended_requests(llm: Any) -> None:
    """Catches a change that is confirmed for an ended request, or from position 0 for a preempted one."""
    engine = llm.llm_engine
    engine.add_request("two", prompt(1, 2, 3), params(8, steering=[add(live="calm")]))
    for _ in range(3):
        engine.step()
    ended = live_ids(engine, "two")
    before = llm.set_strength("two", calm=0.5)
    assert before > 3
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert llm.set_strength("two", calm=0.5) >= before
    finish(engine)
    engine.add_request("three", prompt(1, 2, 3), params(1))
    finish(engine)
    assert llm.collective_rpc("steering_set_strength", args=(ended, {"calm": 1.0})) == [[-1]]


def test_many_ended_requests_do_not_move_a_preempted_one() -> None:
    """Catches position 0, which is confirmed for a preempted request once thousands of others have ended."""
    strengths = LiveStrengths()
    strengths.begin("waits", "waits live", 4)
    strengths.pause("waits", 50)
    for number in range(5000):
        strengths.begin(str(number), f"{number} live", 4)
        strengths.end([str(number)])
    assert strengths.set("waits live", {"calm": 0.5}, None) == 50
    assert strengths.set("4999 live", {"calm": 0.5}, None) == ENDED
    assert strengths.set("0 live", {"calm": 0.5}, None) == 0, "the oldest are forgotten, so memory is bounded"


@pytest.mark.parametrize("aborted", [False, True])
def test_end_before_the_answer_of_the_engine(llm: Any, monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    """Catches a refusal of a change that took effect and then ended its request, and a confirmation without effect."""
    engine = llm.llm_engine
    engine.add_request("four", prompt(1, 2, 3), params(8, steering=[add(live="calm")]))
    for _ in range(3):
        engine.step()
    (ids,) = samples_of(engine.output_processor, "four")
    change, outputs = engine.collective_rpc, dict[str, Any]()

    def end_after(*args: Any, **kwargs: Any) -> Any:
        answers = change(*args, **kwargs)
        if aborted:
            engine.abort_request([ids.engine_id], internal=True)
        else:
            outputs.update(finish(engine))
        return answers

    monkeypatch.setattr(engine, "collective_rpc", end_after)
    if aborted:
        with pytest.raises(EndedRequestError, match="ended before the change"):
            llm.set_strength("four", calm=0.5)
        return
    first = llm.set_strength("four", calm=0.5)
    trace = outputs["four"].outputs[0].steering_trace
    assert trace.live["calm"].tolist() == [0.5 if position >= first else 1.0 for position in trace.positions]
    assert 1.0 in trace.live["calm"] and 0.5 in trace.live["calm"]


def test_reused_id_starts_with_its_own_strengths(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a request with the strengths of an ended one that had its id, in engines that keep the ids they get."""
    monkeypatch.setitem(vars(envs), "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", True)
    engine = llm.llm_engine
    for number in range(2):
        engine.add_request("again", prompt(1, 2, 3), params(6, steering=[add(live="calm")]))
        ended = live_ids(engine, "again")
        engine.step()
        if not number:
            llm.set_strength("again", calm=3.0)
        (output,) = finish(engine).values()
        strengths = output.outputs[0].steering_trace.live["calm"]
        assert strengths.tolist() == ([3.0] if not number else [1.0]) * len(strengths)
    engine.add_request("other", prompt(1, 2, 3), params(1))
    engine.step()
    assert llm.collective_rpc("steering_set_strength", args=(ended, {"calm": 1.0})) == [[-1]]


@pytest.mark.parametrize("steps_between", [False, True])
def test_strength_before_the_first_step_of_a_reused_id(
    llm: Any, steps_between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a change of a new request that goes to the ended request that had its id, whose end workers hear later.

    With steps between the two, the workers know that the first request has ended.
    """
    monkeypatch.setitem(vars(envs), "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", True)
    engine = llm.llm_engine

    def submit(name: str) -> None:
        engine.add_request(name, prompt(1, 2, 3), params(6, steering=[add(live="calm")]))

    def strengths() -> Any:
        (output,) = finish(engine).values()
        return output.outputs[0].steering_trace.live["calm"]

    submit("early")
    strengths()
    if steps_between:
        submit("other")
        strengths()
    submit("early")
    assert llm.set_strength("early", calm=2.5) == 0
    assert set(strengths()) == {2.5}


def test_samples_change_together(llm: Any) -> None:
    """Catches samples of one request that share an id of live strengths, so that only one of them changes."""
    engine = llm.llm_engine
    engine.add_request("both", prompt(1, 2, 3), params(6, n=2, temperature=1.0, steering=[add(live="calm")]))
    assert len(set(live_ids(engine, "both"))) == 2
    engine.step()
    assert llm.set_strength("both", calm=2.5) > 0
    traces: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        traces |= {sample.index: sample.steering_trace for output in engine.step() for sample in output.outputs}
    assert [traces[index].live["calm"][-1] for index in range(2)] == [2.5, 2.5]


@pytest.mark.parametrize("preempted", [False, True])
def test_no_prompt_is_split(llm: Any, preempted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a prompt with two strengths, also after a preemption, and one position for samples that differ.

    The first sample has computed a part of its prompt, the second one nothing.
    """
    engine, length = llm.llm_engine, 40
    edits = [add(layer=1, live="calm", tokens="all")]
    rows = {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}

    def submit(name: str, n: int) -> None:
        fields = {"steering": edits, "capture": rows, "n": n, "temperature": 1.0}
        engine.add_request(name, prompt(*range(1, length + 1)), params(4, **fields))

    def samples_at_end() -> dict[int, Any]:
        samples: dict[int, Any] = {}
        while engine.has_unfinished_requests():
            samples |= {sample.index: sample for output in engine.step() for sample in output.outputs}
        return samples

    def prompt_rows(sample: Any) -> Any:
        return sample.capture_results["memory"].tensor("post_block", 1)[:length]

    expected = []
    for strength in (1.0, 2.5):
        submit(f"whole {strength}", 1)
        llm.set_strength(f"whole {strength}", calm=strength)
        expected.append(prompt_rows(samples_at_end()[0]))
    monkeypatch.setattr(engine.engine_core.engine_core.scheduler, "max_num_scheduled_tokens", 16)
    submit("split", 2)
    engine.step()
    position = llm.set_strength("split", calm=2.5)
    assert (position, position.positions) == (length, {0: length, 1: 0})
    if preempted:
        engine.step()
        assert llm.reset_prefix_cache(reset_running_requests=True)
        assert llm.set_strength("split", calm=2.5).positions[0] == length
    samples = samples_at_end()
    for number, rows_of_prompt in enumerate(expected):
        torch.testing.assert_close(prompt_rows(samples[number]), rows_of_prompt, rtol=0, atol=1e-4)
        trace = samples[number].steering_trace
        assert set(trace.live["calm"].tolist()) == {2.5}, number


def test_refuses_an_id_of_several_requests(llm: Any) -> None:
    """Catches a change of another request with the same id, and one that the first of them decides about."""
    engine = llm.llm_engine
    for fields in ({}, {"steering": [add(live="calm")]}):
        engine.add_request("twice", prompt(1, 2, 3), params(6, **fields))
    engine.step()
    with pytest.raises(SteeringError, match="2 running requests have the id 'twice'") as refused:
        llm.set_strength("twice", calm=2.5)
    assert refused.value.field == "request_id"
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {1.0} == {
        value for each in outputs if (trace := each.outputs[0].steering_trace) for value in trace.live["calm"]
    }


def test_reused_id_shares_no_blocks(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches cached blocks of an ended request, with its strength, in a request with its id and another strength."""
    monkeypatch.setitem(vars(envs), "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", True)
    engine, tokens = llm.llm_engine, range(1, 41)
    answers = []
    for name, strength in (("blocks", 8.0), ("blocks", 0.0), ("fresh", 0.0)):
        engine.add_request(name, prompt(*tokens), params(6, steering=[add(live="calm", tokens="all", strength=4.0)]))
        llm.set_strength(name, calm=strength)
        (output,) = finish(engine).values()
        assert not output.num_cached_tokens
        answers.append(tokens_of(output))
    assert answers[0] != answers[1] == answers[2]


@pytest.mark.parametrize("again", [False, True])
def test_change_while_tokens_are_computed_again(llm: Any, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a change that is confirmed from a token on that a resumed request computes again with its old strength.

    The request is preempted once, or again before it has computed all of its tokens.
    """
    engine, length = llm.llm_engine, 40
    scheduler = engine.engine_core.engine_core.scheduler
    engine.add_request("resumed", prompt(*range(1, length + 1)), params(12, steering=[add(live="calm", tokens="all")]))
    for _ in range(4):
        engine.step()
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 16)
    for _ in range(1 + again):
        assert llm.reset_prefix_cache(reset_running_requests=True)
        engine.step()
    if again:
        assert llm.reset_prefix_cache(reset_running_requests=True)
    position = llm.set_strength("resumed", calm=2.5)
    while engine.has_unfinished_requests():
        (output,) = engine.step() or (None,)
    assert output is not None
    trace = output.outputs[0].steering_trace
    assert position > length
    assert trace.live["calm"].tolist() == [2.5 if each >= position else 1.0 for each in trace.positions.tolist()]

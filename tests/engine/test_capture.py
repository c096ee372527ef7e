# SPDX-License-Identifier: Apache-2.0
"""Capture in the engine: which rows are captured, in which format, and what is refused."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tests.engine.answers import finish, logprobs_of, params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.tiny import HIDDEN, LAYERS, VOCAB, direction
from vllm_steer import Edit, SteeringError, capture_hidden_states
from vllm_steer.plugin import request_state


@pytest.mark.failure(1)
@pytest.mark.feature("prefix caching", "capture")
def test_prefix_cache_hit_does_not_shorten_a_capture(llm: Any) -> None:
    """Catches a capture cut short by a prefix-cache hit, and a cache that captures disable."""
    p = prompt(*np.random.default_rng(31).integers(1, VOCAB, 400).tolist())
    first = run(llm, [p], [params(2, capture=capture(positions="all_prompt"))])[0]
    again = run(llm, [p], [params(2, capture=capture(positions="all_prompt"))])[0]
    assert again.num_cached_tokens == 0
    close_to(result(again), result(first))
    late = run(llm, [p], [params(2, capture=capture(positions=[[300, None]]))])[0]
    assert 0 < late.num_cached_tokens <= 300
    torch.testing.assert_close(
        result(late).tensor("post_block", 2)[:100], result(first).tensor("post_block", 2)[300:], atol=2e-3, rtol=1e-4
    )
    last = run(llm, [p], [params(2, capture=capture(positions="last_prompt"))])[0]
    assert last.num_cached_tokens >= 384


@pytest.mark.feature("`cache_salt`", "capture")
def test_cache_salt_changes_no_row(llm: Any) -> None:
    """Catches rows cut short by cached blocks of the same or another salt."""
    tokens = np.random.default_rng(19).integers(1, VOCAB, 150).tolist()
    right = result(run(llm, [prompt(*tokens)], [params(2, capture=capture())])[0])
    for salt in ("a", "a", "b"):
        salted = {**prompt(*tokens), "cache_salt": salt}
        run(llm, [salted], [params(2)])
        close_to(result(run(llm, [salted], [params(2, capture=capture())])[0]), right, salt)


@pytest.mark.failure(1, control=True)
def test_unlimited_cache_hit_is_reported_as_partial(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with vLLM's own cache hit, rows are missing and the status is not ok."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = type(llm.llm_engine.engine_core.engine_core.scheduler)
    monkeypatch.setattr(scheduler, "_get_local_prefix_cache_hit", Scheduler._get_local_prefix_cache_hit)
    p = prompt(*np.random.default_rng(32).integers(1, VOCAB, 400).tolist())
    run(llm, [p], [params(2)])
    found = run(llm, [p], [params(2, capture=capture(positions="all_prompt"))])[0].capture_results["memory"]
    assert found.status == "partial"
    assert "of 400 positions" in found.error


@pytest.mark.failure(11)
@pytest.mark.feature("several samples (`n > 1`)", "capture")
def test_every_sample_has_its_own_rows(llm: Any) -> None:
    """Catches n > 1 without captures, or with the same rows for every sample."""
    p = prompt(*range(20, 40))
    output = run(llm, [p], [params(8, n=3, temperature=1.5, seed=3, logprobs=None, capture=capture())])[0]
    assert len({tuple(tokens_of(output, s)) for s in range(3)}) == 3
    for sample in range(3):
        found = result(output, sample)
        follow = prompt(*p["prompt_token_ids"], *tokens_of(output, sample)[:-1])
        right = run(llm, [follow], [params(1, capture=capture(positions="all_prompt"))])[0]
        close_to(found, result(right), sample)
    assert output.capture_results is output.outputs[0].capture_results
    assert len({result(output, sample).data.submission for sample in range(3)}) == 1


def test_requests_are_numbered_in_the_order_of_submission(llm: Any) -> None:
    """Catches numbers in the order of completion, and one number for all samples or for none."""
    lengths = (6, 1, 4)
    outputs = run(
        llm,
        [prompt(*range(20 + i, 30 + i)) for i in range(3)],
        [
            params(length, n=2, temperature=1.0, seed=i, logprobs=None, capture=capture())
            for i, length in enumerate(lengths)
        ],
    )
    numbers = [[result(output, sample).data.submission for sample in range(2)] for output in outputs]
    first = numbers[0][0]
    assert numbers == [[first + i] * 2 for i in range(3)]


@pytest.mark.failure(5)
def test_captured_rows_do_not_change(llm: Any) -> None:
    """Catches a captured tensor that a kernel or the next step overwrites."""
    p = prompt(*range(20, 40))
    found = result(run(llm, [p], [params(4, capture=capture())])[0])
    kept = {site: found.tensor(*site).clone() for site in found.sites}
    run(llm, [prompt(*range(50, 90))] * 3, [params(8, capture=capture())] * 3)
    for site, rows in kept.items():
        assert torch.equal(found.tensor(*site), rows)


def test_captures_before_and_after_an_edit(llm: Any) -> None:
    """Catches a capture on the wrong side of its point's own edits."""
    v = direction(3)
    edit = Edit(kind="add", point="post_block", layers=1, vector=v, tokens="prompt")
    p = prompt(*range(20, 40))
    hooks = {"post_block": [1]}
    plain, before, after = (
        result(
            run(llm, [p], [params(1, steering=edits, capture=capture(hooks=hooks, before=b, positions="all_prompt"))])[
                0
            ]
        )
        for edits, b in ((None, False), ([edit], True), ([edit], False))
    )
    torch.testing.assert_close(before.tensor("post_block", 1), plain.tensor("post_block", 1))
    torch.testing.assert_close(after.tensor("post_block", 1), plain.tensor("post_block", 1) + torch.from_numpy(v))


@pytest.mark.failure(4)
@pytest.mark.failure(7)
def test_adjacent_points_capture_the_same_sum(llm: Any) -> None:
    """Catches one summand of the (hidden, residual) pair captured as the stream."""
    found = result(run(llm, [prompt(*range(20, 40))], [params(3, capture=capture())])[0])
    for layer in range(LAYERS - 1):
        torch.testing.assert_close(found.tensor("post_block", layer), found.tensor("pre_attn", layer + 1))
    for site in found.sites:
        assert found.tensor(*site).norm(dim=1).min() > 0.1


def test_plain_requests_are_bit_identical(llm: Any) -> None:
    """Catches a read that changes what it reads, or anybody else's."""
    prompts = [prompt(*np.random.default_rng(i).integers(1, VOCAB, 30).tolist()) for i in range(8)]
    read = run(llm, prompts, [params(capture=capture()) if i % 2 else params() for i in range(8)])
    plain = run(llm, prompts, [params(skip_reading_prefix_cache=True) for _ in range(8)])
    for i in range(8):
        np.testing.assert_allclose(logprobs_of(read[i]), logprobs_of(plain[i]), atol=1e-4)


def test_reductions_and_dtypes(llm: Any) -> None:
    """Catches a reduction over the wrong axis or in the wrong precision."""
    p = prompt(*range(20, 40))
    probes = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype("f4")
    specs = {"hooks": {"post_attn": [2]}, "positions": "all_prompt"}
    whole, mean, last, scores, half = (
        result(run(llm, [p], [params(1, capture={"memory": {**specs, **extra}})])[0]).tensor("post_attn", 2)
        for extra in (
            {},
            {"reduce": "mean"},
            {"reduce": "last"},
            {"reduce": {"directions": probes}},
            {"dtype": "float16"},
        )
    )
    torch.testing.assert_close(mean, whole.mean(0, keepdim=True))
    torch.testing.assert_close(last, whole[-1:])
    directions = torch.from_numpy(probes).double()
    # Bound of float32 summation in any order: one rounding of the largest partial sum per term.
    bound = HIDDEN * 2**-24 * (whole.double().abs() @ directions.abs().T)
    off = (scores.double() - whole.double() @ directions.T).abs()
    assert scores.shape == (20, 3)
    assert (off <= bound).all()
    assert torch.equal(half, whole.half())


@pytest.mark.failure(17)
def test_last_sampled_token_has_no_row(llm: Any) -> None:
    """Catches rows of the surplus step after a stop, and a row for a token that was never forwarded."""
    p = prompt(*range(20, 40))
    found = result(run(llm, [p], [params(5, capture=capture(positions="all_generated"))])[0])
    assert found.positions("post_block", 0).tolist() == [20, 21, 22, 23]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "consumer": ({"missing": {"hooks": {"post_block": [1]}}}, "capture.missing"),
    "point": ({"memory": {"hooks": {"post_mlp": [1]}}}, "post_mlp"),
    "layer": ({"memory": {"hooks": {"post_block": [LAYERS]}}}, "layer 4"),
    "position": ({"memory": {"hooks": {"post_block": [1]}, "positions": [100000]}}, "position 100000"),
    "before the prompt": ({"memory": {"hooks": {"post_block": [1]}, "positions": [-30]}}, "-30"),
    "no hooks": ({"memory": {"hooks": {}}}, "hooks"),
    "dtype": ({"memory": {"hooks": {"post_block": [1]}, "dtype": "int8"}}, "dtype"),
    "option": ({"memory": {"hooks": {"post_block": [1]}, "colour": "red"}}, "colour"),
    "stream": ({"memory": {"hooks": {"post_block": [1]}, "stream": True}}, "DELTA"),
    "width": ({"memory": {"hooks": {"post_block": [1]}, "reduce": {"directions": [[1.0, 2.0]]}}}, "hidden size"),
}


@pytest.mark.failure(12)
@pytest.mark.parametrize("name", list(BAD))
def test_invalid_captures_are_refused(llm: Any, name: str) -> None:
    """Catches an unknown name that is ignored, or that takes the engine down."""
    spec, said = BAD[name]
    with pytest.raises(SteeringError, match=said):
        run(llm, [prompt(1, 2, 3)], [params(capture=spec)])
    assert len(tokens_of(run(llm, [prompt(1, 2, 3)], [params()])[0])) == 6


@pytest.mark.failure(20)
@pytest.mark.feature("aborts", "capture")
def test_aborted_captures_are_released(llm: Any) -> None:
    """Catches rows that are kept until garbage collection."""
    engine = llm.llm_engine
    for i in range(4):
        engine.add_request(f"gone-{i}", prompt(*range(1, 30)), params(200, logprobs=None, capture=capture()))
    for _ in range(4):
        engine.step()
    engine.abort_request([f"gone-{i}" for i in range(4)])
    finish(engine)
    run(llm, [prompt(1, 2, 3)], [params(2)])
    scheduler = engine.engine_core.engine_core.scheduler
    assert scheduler.steering_row_sender.num_bytes == 0
    assert engine.output_processor.request_states == {}
    assert engine.model_executor.driver_worker.worker.model_runner.steering.store.num_capturing == 0


def test_aborted_samples_release_the_rows_of_ended_ones(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows of a sample that has ended, kept for ever if the client aborts the request's other samples.

    Negative control: a reference to these requests, as vLLM's dict has it.
    """
    engine, processor = llm.llm_engine, llm.llm_engine.output_processor

    def rows_are_released() -> bool:
        wanted = params(60, n=2, temperature=1.0, seed=1, logprobs=None, capture=capture(),
                        output_kind=RequestOutputKind.FINAL_ONLY)  # fmt: skip
        engine.add_request("several", prompt(1, 2, 3), wanted)
        engine.step()
        first = next(iter(processor.request_states.values()))
        parent = weakref.ref(first.parent_req)
        ended = EngineCoreOutput(first.request_id, [], finish_reason=FinishReason.STOP)
        engine.engine_core.abort_requests([first.request_id])
        processor.process_outputs([ended])
        del first
        (rows,) = (weakref.ref(each.capture_results) for each in parent().output_aggregator if each is not None)
        engine.abort_request(["several"])
        finish(engine)
        return rows() is None and not processor.parent_requests

    assert rows_are_released()
    monkeypatch.setattr(request_state, "WeakValueDictionary", dict)
    monkeypatch.setattr(processor, "parent_requests", {})
    assert not rows_are_released()


def test_hidden_states_are_stacked_in_prompt_order(llm: Any) -> None:
    """Catches rows attributed to another prompt if lengths differ."""
    prompts = [prompt(*range(5, 5 + n)) for n in (3, 9, 6)]
    last = capture_hidden_states(llm, prompts, hooks={"post_block": [0, 2]}, use_tqdm=False)
    every = capture_hidden_states(llm, prompts, hooks={"post_block": 2}, positions="all_prompt", use_tqdm=False)
    assert last.sites == (("post_block", 0), ("post_block", 2))
    assert [len(rows) for rows in every.tensors("post_block", 2)] == [3, 9, 6]
    assert every.prompt_index("post_block", 2).tolist() == [0] * 3 + [1] * 9 + [2] * 6
    assert every.positions("post_block", 2).tolist() == [*range(3), *range(9), *range(6)]
    torch.testing.assert_close(
        last.tensor("post_block", 2), every.tensor("post_block", 2)[[2, 11, 17]], atol=1e-4, rtol=1e-4
    )

# SPDX-License-Identifier: Apache-2.0
"""Tests of batches with many programs: each request gets its own edits and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.answers import finish, logprobs_of, params, prompt, run, tokens_of
from tests.tiny import LAYERS, VOCAB, direction
from vllm_steer import Edit, SamplingParams

KINDS = ("add", "add_normed", "ablate", "clamp")
POINTS = ("pre_attn", "post_attn", "post_block")
SELECTORS: tuple[Any, ...] = ("all", "prompt", "generated", "last_prompt", [0, -2, (4, 6)], [(-1, None)])


def program(seed: int) -> list[Edit]:
    """Return one to three edits, different for each seed."""
    rng = np.random.default_rng(seed)
    edits = []
    for i in range(int(rng.integers(1, 4))):
        kind = KINDS[(seed + i) % 4]
        edits.append(
            Edit(
                kind=kind,  # type: ignore[arg-type]
                point=POINTS[(seed // 4 + i) % 3],  # type: ignore[arg-type]
                layers=[int(rng.integers(LAYERS - 1))],  # the last layer's edits of prompt tokens reach no output
                vector=direction(1000 * seed + i),
                strength=float(rng.uniform(0.5, 1.5)),
                tokens=SELECTORS[(seed + i) % len(SELECTORS)],
                **({"low": 200.0} if kind == "clamp" else {}),
            )
        )
    return edits


def workload(count: int) -> list[Any]:
    rng = np.random.default_rng(7)
    return [prompt(*rng.integers(1, VOCAB, int(rng.integers(6, 20))).tolist()) for _ in range(count)]


@pytest.fixture(scope="module")
def mixed(llm: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Return outputs of 64 requests with different programs and 32 plain ones, and of the same batch all plain."""
    prompts = workload(96)
    wanted = [params() if i % 3 == 0 else params(steering=program(i)) for i in range(96)]
    return prompts, wanted, run(llm, prompts, wanted), run(llm, prompts, [params() for _ in prompts])


@pytest.mark.feature("continuous batching", "steer")
def test_64_programs_in_a_batch_match_requests_alone(llm: Any, mixed: Any) -> None:
    """Catches rows assigned to the wrong request under continuous batching.

    Every request runs again in another order, and a sample of them alone.
    """
    prompts, wanted, together, _ = mixed
    order = np.random.default_rng(3).permutation(96)
    shuffled = run(llm, [prompts[i] for i in order], [wanted[i] for i in order])
    others = [(int(i), output) for i, output in zip(order, shuffled, strict=True)]
    others += [(i, run(llm, [prompts[i]], [wanted[i]])[0]) for i in range(1, 96, 12)]
    for i, other in others:
        assert tokens_of(other) == tokens_of(together[i]), i
        np.testing.assert_allclose(logprobs_of(other), logprobs_of(together[i]), atol=2e-4, err_msg=str(i))


def test_every_program_has_an_effect(mixed: Any) -> None:
    """Catches a no-op, which would pass every comparison of steered requests."""
    _, _, together, plain = mixed
    for i in range(96):
        if i % 3:
            assert np.abs(logprobs_of(together[i]) - logprobs_of(plain[i])).max() > 1e-2, i


def test_plain_requests_are_bit_identical(mixed: Any) -> None:
    """Catches an edit that leaks, and any arithmetic on rows of plain requests."""
    _, _, together, plain = mixed
    for i in range(0, 96, 3):
        np.testing.assert_array_equal(logprobs_of(together[i]), logprobs_of(plain[i]))


def test_comparison_finds_exchanged_rows(llm: Any, mixed: Any) -> None:
    """Negative control: with two exchanged slots, the test above fails."""
    prompts, wanted, together, _ = mixed
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner

    class Exchanged(dict[str, int]):
        def get(self, name: str, default: Any = None) -> Any:
            return next((slot for other, slot in self.items() if other != name), default)

    runner._steer_slot_of = Exchanged(runner._steer_slot_of)
    try:
        exchanged = run(llm, prompts[1:3], wanted[1:3])
    finally:
        runner._steer_slot_of = dict(runner._steer_slot_of)
    assert any(
        np.abs(logprobs_of(got) - logprobs_of(right)).max() > 1e-2
        for got, right in zip(exchanged, together[1:3], strict=True)
    )


def test_edits_at_one_site_apply_in_order(llm: Any) -> None:
    """Catches reordered edits: ablating after adding removes the direction; adding after ablating keeps it."""
    v = direction(3)
    add = Edit(kind="add", point="post_block", layers=1, vector=v)
    ablate = Edit(kind="ablate", point="post_block", layers=1, vector=v)
    p = [prompt(*range(5, 12))] * 3
    first, second, only = run(llm, p, [params(steering=s) for s in ([add, ablate], [ablate, add], [ablate])])
    np.testing.assert_allclose(logprobs_of(first), logprobs_of(only), atol=1e-4)
    assert np.abs(logprobs_of(second) - logprobs_of(only)).max() > 1e-2


def test_edits_of_phases_add_up(llm: Any) -> None:
    """Catches a phase that is skipped: prompt and generated together are all tokens, and base edits add to them."""
    v = direction(4)
    site = {"post_attn": {2: v}}
    half = {"post_attn": {2: {"vector": v, "scale": 0.5}}}
    p = [prompt(*range(5, 12))] * 4
    whole, split, doubled, tail = run(
        llm,
        p,
        [
            params(steering_vectors=site),
            params(prefill_steering_vectors=site, decode_steering_vectors=site),
            params(steering_vectors=half, prefill_steering_vectors=half, decode_steering_vectors=half),
            params(decode_steering_vectors=site),
        ],
    )
    np.testing.assert_allclose(logprobs_of(whole), logprobs_of(split), atol=1e-4)
    np.testing.assert_allclose(logprobs_of(whole), logprobs_of(doubled), atol=1e-4)
    plain = run(llm, p[:1], [params()])[0]
    np.testing.assert_allclose(logprobs_of(tail)[0], logprobs_of(plain)[0], atol=1e-5)
    assert np.abs(logprobs_of(tail)[1] - logprobs_of(plain)[1]).max() > 1e-2


@pytest.mark.failure(10)
def test_sampling_params_can_be_reused(llm: Any) -> None:
    """Catches a reused SamplingParams that runs unsteered, or with another request's vector."""
    wanted = params(steering_vectors={"pre_attn": {1: direction(5)}})
    p = prompt(*range(20, 30))
    first = run(llm, [p], [wanted])[0]
    run(llm, [p], [params(steering_vectors={"pre_attn": {1: direction(6)}})])
    again = run(llm, [p, p], [wanted, wanted])
    for output in again:
        np.testing.assert_allclose(logprobs_of(output), logprobs_of(first), atol=1e-4)


@pytest.mark.feature("several samples (`n > 1`)", "steer")
def test_every_sample_is_steered(llm: Any) -> None:
    """Catches n > 1 of which no sample, or only the first, is steered."""
    p = prompt(*range(20, 30))
    site = {"post_block": {1: direction(8)}}
    one = run(llm, [p], [params(steering_vectors=site)])[0]
    plain = run(llm, [p], [params()])[0]
    several = run(llm, [p], [params(steering_vectors=site, n=3, temperature=0.7, seed=1)])[0]
    assert len(several.outputs) == 3
    for sample in range(3):
        np.testing.assert_allclose(logprobs_of(several, sample)[0], logprobs_of(one)[0], atol=1e-4)
        assert np.abs(logprobs_of(several, sample)[0] - logprobs_of(plain)[0]).max() > 1e-2


@pytest.mark.failure(10)
def test_request_ids_with_a_common_prefix_are_distinct(llm: Any) -> None:
    """Catches state that is looked up by a prefix of the request id."""
    p = prompt(*range(40, 50))
    engine = llm.llm_engine
    wanted = {
        "a": params(steering_vectors={"post_block": {1: direction(9)}}),
        "a-1": params(steering_vectors={"post_block": {1: direction(10)}}),
        "a-11": params(),
    }
    for name, each in wanted.items():
        engine.add_request(name, p, each)
    done = {}
    done.update(finish(engine))
    for name, each in wanted.items():
        alone = run(llm, [p], [each])[0]
        np.testing.assert_allclose(logprobs_of(done[name]), logprobs_of(alone), atol=1e-4, err_msg=name)


def test_vllm_sampling_params_still_work(llm: Any) -> None:
    """Catches a subclass that breaks plain use, clones or isinstance."""
    from vllm.sampling_params import SamplingParams as Plain

    assert isinstance(params(), Plain)
    assert isinstance(Plain(), SamplingParams)
    assert params(steering_vectors={"post_block": {0: direction(1)}}).clone().extra_args["steer"]
    assert len(tokens_of(run(llm, [prompt(1, 2, 3)], [Plain(max_tokens=3, detokenize=False, ignore_eos=True)])[0])) == 3

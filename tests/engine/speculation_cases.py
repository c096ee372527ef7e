# SPDX-License-Identifier: Apache-2.0
"""Cases of n-gram speculative decoding: rejected drafts leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import drafts
from tests.engine.answers import finish, params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import opened
from tests.engine.record_cases import add
from tests.tiny import direction
from vllm_steer.capture import row_assembler
from vllm_steer.frontend.context import context_of

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def workload() -> tuple[list[Any], list[Any]]:
    """Return requests with repetitive prompts, so that drafts are made and many are rejected."""
    rng = np.random.default_rng(2)
    prompts = [prompt(*(rng.integers(1, 12, 6).tolist() * 5)) for _ in range(6)]
    wanted = [
        params(
            24,
            logprobs=None,
            capture=capture(positions="all" if i % 2 else [[28, 41]]),
            decode_steering_vectors={"post_block": {1: direction(i)}} if i % 3 == 0 else None,
        )
        for i in range(6)
    ]
    return prompts, wanted


REPETITIVE = [np.random.default_rng(i).integers(1, 40, 5).tolist() * (2 + 2 * i) + [i] for i in range(3)]


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> tuple[list[Any], list[Any]]:
    """Return outputs of an engine without drafts: each request of the workload alone, and lens readouts."""
    with opened(tiny_llama, max_model_len=128) as plain:
        outputs = [run(plain, [p], [w])[0] for p, w in zip(*workload(), strict=True)]
        lens = drafts.run_lens(plain, REPETITIVE)
    return outputs, lens


@pytest.fixture(scope="module")
def truth(plain: tuple[list[Any], list[Any]]) -> list[Any]:
    """Return each request's output alone in an engine without drafts."""
    return plain[0]


@pytest.fixture(scope="module")
def decided(tiny_llama: Path) -> drafts.Truth:
    """Return gates and stops, and what a reference without drafts does."""
    return (*drafts.truth_of(tiny_llama, REPETITIVE), REPETITIVE)


@pytest.fixture(scope="module")
def drafting(tiny_llama: Path, truth: list[Any]) -> Iterator[Any]:
    with opened(tiny_llama, max_model_len=128, block_size=32, speculative_config=SPECULATIVE) as llm:
        yield llm


def test_captures_and_steers_accepted_drafts_only(
    drafting: Any, truth: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rejected drafts that are captured as generated, and rows of a draft kept for another token."""
    seen = []
    scheduler = drafting.llm_engine.engine_core.engine_core.scheduler
    original = type(scheduler).update_from_output

    def counted(self: Any, scheduled: Any, output: Any) -> Any:
        for name, draft in scheduled.scheduled_spec_decode_tokens.items():
            accepted = len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1
            seen.append((len(draft), accepted))
        return original(self, scheduled, output)

    monkeypatch.setattr(type(scheduler), "update_from_output", counted)
    outputs = run(drafting, *workload())
    context = context_of(drafting.llm_engine.output_processor)
    assert context is not None
    assert context.capabilities.drafts == SPECULATIVE["num_speculative_tokens"]
    assert any(accepted < drafts for drafts, accepted in seen), "no draft was rejected"
    for i, (got, right) in enumerate(zip(outputs, truth, strict=True)):
        assert tokens_of(got) == tokens_of(right), i
        close_to(result(got), result(right), i)


def test_check_finds_rows_of_rejected_drafts(drafting: Any, truth: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: keeping the first row of a position instead of the last keeps drafts."""

    def first_counts(chunks: Any, wanted: Any) -> Any:
        came = np.concatenate([np.arange(each.start, each.start + each.count) for each in chunks])
        positions, first = np.unique(came, return_index=True)
        keep = np.isin(positions, wanted)
        return row_assembler._Chosen(positions[keep], first[keep])

    monkeypatch.setattr(row_assembler, "_choose", first_counts)
    outputs = run(drafting, *workload())
    assert {result(output).status for output in outputs} == {"ok"}
    with pytest.raises(AssertionError):
        for got, right in zip(outputs, truth, strict=True):
            close_to(result(got), result(right))


def test_every_window_and_stop(drafting: Any, decided: drafts.Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a gate or a stop of a rejected draft, and a draft with the factor of the token before it."""
    drafts.check_every_window(drafting, decided)
    drafts.draft_likely_text(monkeypatch, drafting, decided)
    drafts.check_every_window(drafting, decided)


def test_parts_of_the_output(drafting: Any, tiny_llama: Path) -> None:
    """Catches a marker among rejected drafts, and one that counts from the next step on."""
    drafts.check_parts(drafting, tiny_llama, REPETITIVE)


def test_checks_find_kept_drafts(drafting: Any, decided: drafts.Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    drafts.draft_likely_text(monkeypatch, drafting, decided)
    drafts.check_controls(drafting, decided)


@pytest.mark.parametrize("pressure", [lambda llm: drafts.few_blocks(llm, 9), drafts.resets], ids=["blocks", "resets"])
def test_preemption_between_drafts(
    drafting: Any, decided: drafts.Truth, monkeypatch: pytest.MonkeyPatch, pressure: Any
) -> None:
    """Catches decisions that are made again, or from state of rejected drafts, after a preemption."""
    drafts.draft_likely_text(monkeypatch, drafting, decided)
    drafts.check_preempted(drafting, decided, pressure(drafting), pressure(drafting))


def test_lens_of_accepted_drafts(drafting: Any, plain: tuple[list[Any], list[Any]]) -> None:
    """Catches lens readouts of a rejected draft, of another segment, and disturbed rows of captures."""
    drafts.check_lens(drafts.run_lens(drafting, REPETITIVE), plain[1])


def test_live_changes(drafting: Any, tiny_llama: Path) -> None:
    """Catches a change that holds at another position than the reported one, because drafts were rejected."""
    drafts.check_live(drafting, tiny_llama)


def test_live_change_after_a_start_with_one_token(drafting: Any) -> None:
    """Catches a reported position that counts the padding with which vLLM starts a request with one token."""
    engine = drafting.llm_engine
    engine.add_request("long", prompt(*REPETITIVE[0]), params(20, logprobs=None))
    engine.step()
    engine.add_request("short", prompt(5), params(8, logprobs=None, steering=[add(live="calm")]))
    engine.step()
    assert drafting.set_strength("short", calm=0.5) == 1
    done = {}
    done.update(finish(engine))
    trace = done["short"].outputs[0].steering_trace
    assert trace.live["calm"].tolist() == [1.0 if position < 1 else 0.5 for position in trace.positions.tolist()]

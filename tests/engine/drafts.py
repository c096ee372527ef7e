# SPDX-License-Identifier: Apache-2.0
"""Checks of gates, stops and heads that hold under every method of speculative decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import hf
from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.record_cases import GENERATED, add, bounds_of, cases, check_all, expect, run_all
from tests.engine.record_reference import Expected, Reference
from tests.engine.test_live import check_changes, drive
from tests.tiny import VOCAB, direction
from vllm_steer.engine.record_keeper import RecordKeeper
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.taps import records as step_records

Truth = tuple[dict[str, dict[str, Any]], dict[tuple[str, int], Expected], Sequence[list[int]]]
LENS = {"lens": {"top_k": 3}, "point": "post_block", "layers": [1, 3], "positions": "all"}


def truth_of(
    folder: Path, texts: Sequence[list[int]]
) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, int], Expected]]:
    """Return the cases, and what a model without drafts does with each prompt."""
    model = hf.load(folder)
    reference = Reference(model, model.model.layers)
    made = cases(bounds_of(reference, texts))
    return made, expect(reference, made, texts)


def watch_drafts(llm: Any) -> list[tuple[int, int]]:
    """Record ``(drafts, accepted)`` of every verified request of every step from now on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler.update_from_output
    seen: list[tuple[int, int]] = []

    def counted(scheduled: Any, output: Any) -> Any:
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            seen.append((len(drafts), len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1))
        return original(scheduled, output)

    scheduler.update_from_output = counted
    return seen


def draft_likely_text(patch: pytest.MonkeyPatch, llm: Any, truth: Truth) -> None:
    """Let an n-gram proposer draft what a case with the same text so far generates, every third time with an error."""
    _, expected, texts = truth
    known = {(*texts[number], *each.tokens): None for (_, number), each in expected.items()}
    calls = count()

    def propose(drafts: int, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        made = []
        for i, new in enumerate(sampled):
            text = tuple(tokens[i, : lengths[i]].tolist())
            likely = next((each for each in known if each[: len(text)] == text), ()) if new else ()
            draft = list(likely[len(text) : len(text) + drafts])
            if draft and not next(calls) % 3:
                draft[-1] = draft[-1] % (VOCAB - 1) + 1
            made.append(draft)
        return made

    patch.setattr(llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter, "propose", propose)


def check_every_window(llm: Any, truth: Truth) -> None:
    """Compare every window, fold and stop with a reference that has no drafts."""
    made, expected, texts = truth
    seen = watch_drafts(llm)
    check_all(run_all(llm, made, texts), expected, texts)
    assert any(0 <= accepted < drafts for drafts, accepted in seen), "no draft was rejected"
    assert any(accepted > 0 for _, accepted in seen), "no draft was accepted"


def parts_of(
    folder: Path, texts: Sequence[list[int]]
) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, int], Expected]]:
    """Return edits in parts of the output, and what a model without drafts does with each prompt."""
    model = hf.load(folder)
    reference = Reference(model, model.model.layers)
    outputs = [reference.run(tokens, GENERATED, {}).tokens for tokens in texts]
    # Tokens that the model repeats are drafted.
    (start, _), (end, _) = Counter(token for tokens in outputs for token in tokens[:-1]).most_common(2)
    made = {
        where: {"edits": [add(layer=2, strength=0.3, tokens={where: [start, end]})]} for where in ("between", "outside")
    }
    expected = expect(reference, made, texts)
    assert {float(factor) for each in expected.values() for factor in each.factors.ravel()} == {0.0, 1.0}
    return made, expected


@contextmanager
def few_blocks(llm: Any, left: int) -> Iterator[list[bool]]:
    """Leave ``left`` free cache blocks; yield, for each preemption so far, whether the request had drafts."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool, original = scheduler.kv_cache_manager.block_pool, scheduler._preempt_request
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - left)
    preempted: list[bool] = []

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(bool(request.spec_token_ids))
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    try:
        yield preempted
    finally:
        scheduler._preempt_request = original
        pool.free_blocks(taken)


@contextmanager
def resets(llm: Any) -> Iterator[list[bool]]:
    """Preempt and resume all requests in every fourth step; yield as :func:`few_blocks`."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler.schedule
    calls = count()

    def schedule(*args: Any, **kwargs: Any) -> Any:
        if scheduler.running and not next(calls) % 4:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return original(*args, **kwargs)

    with few_blocks(llm, scheduler.kv_cache_manager.block_pool.get_num_free_blocks()) as preempted:
        scheduler.schedule = schedule
        try:
            yield preempted
        finally:
            scheduler.schedule = original


PREEMPTED = ("previous", "previous, ema", "latch, release", "prompt, mean", "several", "stop, two in a row")
"""Cases whose decisions need state or records of earlier tokens."""


def check_preempted(
    llm: Any, truth: Truth, pressure: AbstractContextManager[list[bool]], again: AbstractContextManager[list[bool]]
) -> None:
    """Compare gates and stops of requests that are preempted while drafts run with a reference that has neither."""
    made, expected, texts = truth
    seen = watch_drafts(llm)
    with pressure as preempted:
        outputs = run_all(llm, {name: made[name] for name in PREEMPTED}, texts)
    check_all(outputs, expected, texts)
    assert any(preempted), "no request with drafts was preempted"
    # Negative control: requests that resume without their records must be noticed.
    with pytest.MonkeyPatch.context() as patch, again:
        patch.setattr(RecordKeeper, "_replay", lambda *_: None)
        outputs = run_all(llm, made, texts)
    with pytest.raises(AssertionError):
        check_all(outputs, expected, texts)
    assert any(0 <= accepted < drafts for drafts, accepted in seen), "no draft was rejected"
    assert any(accepted > 0 for _, accepted in seen), "no draft was accepted"


def check_parts(llm: Any, folder: Path, texts: Sequence[list[int]]) -> None:
    """Compare edits in parts of the output with a reference that has no drafts."""
    made, expected = parts_of(folder, texts)
    seen = watch_drafts(llm)
    check_all(run_all(llm, made, texts), expected, texts)
    assert any(accepted > 0 for _, accepted in seen), "no draft was accepted"


def check_live(llm: Any, folder: Path) -> None:
    """Compare changes of a live strength with the reference, which changes it at the reported positions."""
    outputs, changed = drive(llm, [1, 3, 5])
    model = hf.load(folder)
    check_changes(Reference(model, model.model.layers), outputs, changed, 1)


def check_controls(llm: Any, truth: Truth) -> None:
    """Negative controls: kept state of rejected drafts and drafts with another token's factor must be noticed."""
    made, expected, texts = truth
    for break_it in (_keep_rejected, _accept_all):
        with pytest.MonkeyPatch.context() as patch:
            break_it(patch)
            with pytest.raises(AssertionError):
                check_all(run_all(llm, made, texts), expected, texts)


def _keep_rejected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_records, "committed_state", lambda tables, layout: tables.carry[layout.request_slot.long(), 0])


def _accept_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerSteeringManager, "accepted_tokens", lambda *_: None)


def lens_requests() -> list[Any]:
    """Return parameters with lens readouts at all positions and at ranges, some with captures and an edit."""
    return [
        params(
            20,
            logprobs=None,
            readouts={"lens": LENS if i % 2 else {**LENS, "positions": [[4, 12], [20, 26]]}},
            capture={"memory": {"hooks": {"post_block": [1], "pre_attn": [2]}, "positions": "all"}} if i % 3 else None,
            decode_steering_vectors={"post_block": {1: direction(i)}} if i % 2 else None,
        )
        for i in range(6)
    ]


def check_lens(outputs: Sequence[Any], right: Sequence[Any]) -> None:
    """Compare lens readouts with the results of an engine without drafts."""
    for i, (got, want) in enumerate(zip(outputs, right, strict=True)):
        assert tokens_of(got) == tokens_of(want), i
        found, wanted = got.outputs[0].readouts["lens"], want.outputs[0].readouts["lens"]
        assert found.positions.tolist() == wanted.positions.tolist(), i
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=5e-3, err_msg=str(i))
        assert (found.token_ids == wanted.token_ids).mean() > 0.99


def run_lens(llm: Any, texts: Sequence[list[int]]) -> list[Any]:
    """Run the requests with lens readouts in one batch."""
    return run(llm, [prompt(*each) for each in [*texts, *texts]], lens_requests())

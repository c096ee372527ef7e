# SPDX-License-Identifier: Apache-2.0
"""Tests of failures known from other systems, each with a negative control.

The check passes, and fails in an engine whose protection is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.answers import finish, logprobs_of, params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.tiny import VOCAB, direction
from vllm_steer.capture import row_assembler
from vllm_steer.engine import cache_keys
from vllm_steer.engine.runner_v1 import SteeringRunnerV1
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.taps.assignment import BatchLayout

SITE = {"post_block": {1: direction(31)}}
P = prompt(*range(20, 50))


def decode_is_steered_and_prefill_is_not(llm: Any) -> None:
    plain, steered = (logprobs_of(run(llm, [P], [params(3, **f)])[0]) for f in ({}, {"decode_steering_vectors": SITE}))
    np.testing.assert_allclose(steered[0], plain[0], atol=1e-4)
    assert np.abs(steered[1] - plain[1]).max() > 1e-2


def position_0_is_one_token(llm: Any) -> None:
    """Check that output generated with an edit of position 0 continues as if it were prompt."""
    fields = {"steering": [{"kind": "add", "point": "post_block", "layers": 1, "vector": direction(32), "tokens": [0]}]}
    whole = run(llm, [P], [params(6, skip_reading_prefix_cache=True, **fields)])[0]
    follow = prompt(*P["prompt_token_ids"], *tokens_of(whole)[:5])
    again = run(llm, [follow], [params(1, skip_reading_prefix_cache=True, **fields)])[0]
    np.testing.assert_allclose(logprobs_of(whole)[5], logprobs_of(again)[0], atol=1e-3)


def preempted_in_decode_it_goes_on_as_if_nothing_had_been(llm: Any) -> None:
    wanted = params(12, decode_steering_vectors=SITE, capture=capture())
    right = run(llm, [P], [wanted])[0]
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    engine.add_request("preempted", P, wanted)
    done = []
    for number in range(40):
        done += [output for output in engine.step() if output.finished]
        if number in (4, 7):
            assert scheduler.running[0].num_output_tokens > 0
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert tokens_of(done[0]) == tokens_of(right)
    close_to(result(done[0]), result(right))


def ids_that_begin_alike_stay_apart(llm: Any) -> None:
    engine = llm.llm_engine
    wanted = {
        name: params(4, steering_vectors={"post_block": {1: direction(i)}}) for i, name in enumerate(["a", "a-1"])
    }
    for name, each in wanted.items():
        engine.add_request(name, P, each)
    done = {}
    done.update(finish(engine))
    for name, each in wanted.items():
        np.testing.assert_allclose(logprobs_of(done[name]), logprobs_of(run(llm, [P], [each])[0]), atol=1e-3)


def other_content_never_serves_old_content(llm: Any) -> None:
    """Check that another vector at the same site, with the same prompt, does not hit the old vector's blocks."""
    p = prompt(*np.random.default_rng(33).integers(1, VOCAB, 300).tolist())
    for seed in (41, 42):
        site = {"pre_attn": {1: direction(seed)}}
        got = run(llm, [p], [params(2, steering_vectors=site)])[0]
        truth = run(llm, [p], [params(2, steering_vectors=site, skip_reading_prefix_cache=True)])[0]
        np.testing.assert_allclose(logprobs_of(got), logprobs_of(truth), atol=1e-3)
    assert run(llm, [p], [params(2, steering_vectors=site)])[0].num_cached_tokens > 0


def decode_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    real = WorkerSteeringManager._assign_rows

    def assign(self: Any, layout: BatchLayout, num_padded: int) -> None:
        real(self, layout, num_padded)
        if len(layout.position) == 1:
            self.tables.token_row.zero_()

    monkeypatch.setattr(WorkerSteeringManager, "_assign_rows", assign)


def counted_from_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SteeringRunnerV1._steer_step_batch

    def describe(self: Any, inputs: Any) -> Any:
        batch = real(self, inputs)
        layout = batch.layout()
        wrong = replace(layout, position=torch.arange(len(layout.position)))
        return replace(batch, layout=lambda: wrong, first=np.zeros_like(batch.first))

    monkeypatch.setattr(SteeringRunnerV1, "_steer_step_batch", describe)


def appended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assemble rows in order of arrival instead of by position."""

    def choose(chunks: Any, wanted: Any) -> Any:
        return row_assembler._Chosen(np.arange(sum(chunk.count for chunk in chunks)), None)

    monkeypatch.setattr(row_assembler, "_choose", choose)


def prompt_row_for_all_that_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SteeringRunnerV1._steer_bind

    def bind(self: Any, name: str, wanted: Any, prompt_len: int) -> None:
        real(self, name, wanted, self.requests[name].num_tokens if name in self.requests else prompt_len)

    monkeypatch.setattr(SteeringRunnerV1, "_steer_bind", bind)


def found_by_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find requests by a prefix of the client's request id."""

    class ByPrefix(dict[str, int]):
        def get(self, name: str, default: Any = None) -> Any:
            return next((slot for other, slot in self.items() if name.startswith(other.rsplit("-", 1)[0])), default)

    real = SteeringRunnerV1._steer_bind

    def bind(self: Any, *args: Any) -> None:
        real(self, *args)
        self._steer_slot_of = ByPrefix(self._steer_slot_of)

    monkeypatch.setattr(SteeringRunnerV1, "_steer_bind", bind)


def keyed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cache_keys.edit_spans
    monkeypatch.setattr(
        cache_keys,
        "edit_spans",
        lambda *args: tuple((start, digest and b"name") for start, digest in real(*args)),
    )


Break = Callable[[pytest.MonkeyPatch], None]
CASES: list[tuple[int, Callable[[Any], None], Break]] = [
    (3, decode_is_steered_and_prefill_is_not, decode_forgotten),
    (8, position_0_is_one_token, counted_from_each_step),
    (9, preempted_in_decode_it_goes_on_as_if_nothing_had_been, appended),
    (9, preempted_in_decode_it_goes_on_as_if_nothing_had_been, prompt_row_for_all_that_is_computed_again),
    (10, ids_that_begin_alike_stay_apart, found_by_prefix),
    (13, other_content_never_serves_old_content, keyed_by_name),
]


@pytest.mark.failure(3, 8, 9, 10, 13)
@pytest.mark.failure(3, 8, 9, 10, 13, control=True)
@pytest.mark.parametrize(
    ("check", "break_it"),
    [pytest.param(check, br, id=f"{n}-{br.__name__}") for n, check, br in CASES],
)
def test_check_passes_and_finds_the_failure(
    llm: Any, monkeypatch: pytest.MonkeyPatch, check: Callable[[Any], None], break_it: Break
) -> None:
    """Catches the failure that ``check`` names, and a check that cannot find it."""
    check(llm)
    llm.reset_prefix_cache()
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        check(llm)
    monkeypatch.undo()
    llm.reset_prefix_cache()
    finish(llm.llm_engine)

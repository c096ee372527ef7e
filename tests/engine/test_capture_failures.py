# SPDX-License-Identifier: Apache-2.0
"""Failures of capture with several requests, each with its negative control, in one engine.

The expected result comes from the same request alone in the same engine. Controls replace our own code for one run and
only change the contents of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.engine.answers import finish, params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.steps import chunks_of, step_of
from tests.tiny import VOCAB
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.row_assembler import RowChunk
from vllm_steer.engine import device_to_host

Rename = Callable[[RowChunk, list[str]], RowChunk]


def prompts(count: int) -> list[Any]:
    rng = np.random.default_rng(41)
    return [prompt(*rng.integers(1, VOCAB, 20).tolist()) for _ in range(count)]


def change_chunks(monkeypatch: pytest.MonkeyPatch, change: Rename) -> None:
    """Apply ``change`` to the row chunks that leave the worker in every step. It also gets the step's request ids."""
    arrived = device_to_host.PendingRows.wait

    def changed(self: Any) -> Any:
        (step,) = arrived(self)
        chunks = chunks_of(step)
        changed = [change(chunk, [each.request_id for each in chunks]) for chunk in chunks]
        return (step_of(changed, step.rows.shape[1]),)

    monkeypatch.setattr(device_to_host.PendingRows, "wait", changed)


def alone(llm: Any, wanted: Any, asked: list[Any]) -> list[Any]:
    return [run(llm, [each], [wanted])[0] for each in asked]


@pytest.mark.failure(8, control=True)
def test_comparison_detects_positions_relative_to_the_step(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if each step counts positions from 0, every generated token has position 0."""
    wanted, asked = params(6, logprobs=None, capture=capture()), prompts(2)
    right = alone(llm, wanted, asked)
    change_chunks(monkeypatch, lambda chunk, _: msgspec.structs.replace(chunk, start=0))
    for got, true in zip(run(llm, asked, [wanted] * 2), right, strict=True):
        assert tokens_of(got) == tokens_of(true)
        with pytest.raises(AssertionError):
            close_to(result(got), result(true))


def run_named(llm: Any, asked: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """Run requests under the given ids and return their outputs by id."""
    for name, each in asked.items():
        llm.llm_engine.add_request(name, each, wanted)
    outputs: dict[str, Any] = {}
    outputs.update(finish(llm.llm_engine))
    return outputs


NAMES = ("1", "11", "111", "1-", "1-1")


@pytest.mark.failure(10)
def test_ids_with_a_common_prefix_and_shared_parameters(llm: Any) -> None:
    """Catches rows stored by an id's prefix, and shared parameters that capture only once."""
    wanted, asked = params(6, logprobs=None, capture=capture()), prompts(len(NAMES))
    right = alone(llm, wanted, asked)
    for _ in range(2):
        found = run_named(llm, dict(zip(NAMES, asked, strict=True)), wanted)
        for name, true in zip(NAMES, right, strict=True):
            close_to(result(found[name]), result(true), name)


@pytest.mark.failure(10, control=True)
def test_comparison_detects_ids_matched_by_prefix(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each chunk goes to the first request whose id is a prefix of its own or has it as a prefix."""
    wanted, asked = params(6, logprobs=None, capture=capture()), prompts(len(NAMES))
    right = alone(llm, wanted, asked)

    def to_the_first(chunk: RowChunk, names: list[str]) -> RowChunk:
        alike = sorted(name for name in names if name[0] == chunk.request_id[0])
        return msgspec.structs.replace(chunk, request_id=alike[0])

    change_chunks(monkeypatch, to_the_first)
    found = run_named(llm, dict(zip(NAMES, asked, strict=True)), wanted)
    wrong = 0
    for name, true in zip(NAMES, right, strict=True):
        try:
            close_to(result(found[name]), result(true))
        except AssertionError:
            wrong += 1
    assert wrong == len(NAMES)


@pytest.mark.failure(11, control=True)
def test_comparison_detects_shared_rows_of_samples(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: all samples get the rows of the first one."""
    p = prompts(1)[0]
    wanted = params(8, n=3, temperature=1.5, seed=3, logprobs=None, capture=capture())
    first: dict[tuple[int, int], RowChunk] = {}

    def of_the_first(chunk: RowChunk, _: list[str]) -> RowChunk:
        kept = first.setdefault((chunk.start, chunk.count), chunk)
        return msgspec.structs.replace(chunk, rows=kept.rows)

    change_chunks(monkeypatch, of_the_first)
    output = run(llm, [p], [wanted])[0]
    monkeypatch.undo()
    assert len({tuple(tokens_of(output, sample)) for sample in range(3)}) == 3
    wrong = 0
    for sample in range(3):
        follow = prompt(*p["prompt_token_ids"], *tokens_of(output, sample)[:-1])
        right = run(llm, [follow], [params(1, capture=capture(positions="all_prompt"))])[0]
        try:
            close_to(result(output, sample), result(right))
        except AssertionError:
            wrong += 1
    assert wrong >= 2


def failing_consumer(llm: Any, monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...]) -> None:
    """Make the consumer ``memory`` raise for the request with this prompt."""
    desk = llm.llm_engine.output_processor._steering_context.capture_manager
    accept = desk._consumers["memory"].accept

    def raising(captured: Any) -> Any:
        if captured.prompt_token_ids == tokens:
            raise RuntimeError("no room on the tape")
        return accept(captured)

    monkeypatch.setattr(desk._consumers["memory"], "accept", raising)


@pytest.mark.failure(12)
def test_consumer_error_affects_one_capture(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error that ends the step, captures of neighbours, or the request's own tokens."""
    wanted, asked = params(6, logprobs=None, capture=capture()), prompts(3)
    right = alone(llm, wanted, asked)
    failing_consumer(llm, monkeypatch, tuple(asked[1]["prompt_token_ids"]))
    found = run(llm, asked, [wanted] * 3)
    assert [tokens_of(each) for each in found] == [tokens_of(each) for each in right]
    bad = found[1].capture_results["memory"]
    assert (bad.status, bad.error) == ("error", "RuntimeError: no room on the tape")
    for i in (0, 2):
        close_to(result(found[i]), result(right[i]))


@pytest.mark.failure(12, control=True)
def test_consumer_error_without_a_thread_affects_all(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a consumer that runs in the step, unguarded, fails all requests."""
    wanted, asked = params(6, logprobs=None, capture=capture()), prompts(3)
    failing_consumer(llm, monkeypatch, tuple(asked[1]["prompt_token_ids"]))

    def in_the_step(self: Any, name: str, spec: Any, assembler: Any, _: bool, about: Any) -> Any:
        sites, _ = assembler.assemble(spec, len(about["prompt_token_ids"]), 26)
        captured = type("Captured", (), {**about, "sites": sites})()
        return self._consumers[name].accept(captured)

    monkeypatch.setattr(CaptureManager, "_submit", in_the_step)
    engine = llm.llm_engine
    with pytest.raises(RuntimeError, match="no room on the tape"):
        run(llm, asked, [wanted] * 3)
    monkeypatch.undo()
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    finish(engine)
    assert len(result(run(llm, asked[:1], [wanted])[0]).sites) == 12


@pytest.mark.failure(20, control=True)
def test_without_a_budget_all_rows_are_held(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without admission control, host memory for captures grows with the number of requests."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    most = 0

    def watched(held: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        scheduled = type(scheduler).schedule(held, *args, **kwargs)
        most = max(most, held.steering_admission.reserved_rows)
        return scheduled

    monkeypatch.setattr(scheduler, "schedule", lambda *a, **k: watched(scheduler, *a, **k))
    wanted, asked = params(6, logprobs=None, capture=capture()), prompts(8)
    budgets = {}
    for budget in (2 * 12 * 25, 2**40):
        monkeypatch.setattr(scheduler.steering_admission, "_reserved_rows_limit", budget)
        most = 0
        run(llm, asked, [wanted] * 8)
        budgets[budget] = most
    held, unbounded = budgets.values()
    assert held <= 2 * 12 * 25
    assert unbounded == 8 * 12 * 25


@pytest.mark.failure(5)
def test_rows_are_copied_from_the_arena(llm: Any) -> None:
    """Catches rows that are views of the arena, which every step overwrites."""
    tables = llm.llm_engine.model_executor.driver_worker.worker.model_runner.steering.tables
    output = run(llm, prompts(1), [params(4, logprobs=None, capture=capture())])[0]
    kept = {site: result(output).tensor(*site).clone() for site in result(output).sites}
    tables.arena.fill_(float("nan"))
    assert all(torch.equal(result(output).tensor(*site), rows) for site, rows in kept.items())


@pytest.mark.failure(5, control=True)
def test_comparison_detects_views_of_the_arena(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows sent one step late without a copy contain the rows of the later step."""
    wanted, asked = params(6, logprobs=None, capture=capture()), prompts(2)
    right = alone(llm, wanted, asked)
    start = device_to_host.DeviceToHostCopier.start

    def uncopied(self: Any, stored: torch.Tensor, *rest: Any) -> Any:
        pending = start(self, stored, *rest)
        object.__setattr__(pending, "rows", {b"": stored.view(torch.uint8)})
        stored.copy_(stored.flip(0))  # the next step overwrites the arena before the rows are sent
        return pending

    monkeypatch.setattr(device_to_host.DeviceToHostCopier, "start", uncopied)
    for got, true in zip(run(llm, asked, [wanted] * 2), right, strict=True):
        with pytest.raises(AssertionError):
            close_to(result(got), result(true))

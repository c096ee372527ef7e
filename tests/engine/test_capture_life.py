# SPDX-License-Identifier: Apache-2.0
"""Captures under batching, chunked prefill and preemption: every row equals the row of the same request alone.

Engines of one process share vLLM's process groups. The shared engine is created after the engine of the expected
results, and tests with their own engines run last.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import opened
from tests.engine.crowded import crowded_engine
from tests.engine.test_mixing import program
from tests.tiny import VOCAB
from vllm_steer import SteeringError
from vllm_steer.capture import row_assembler
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.engine import device_to_host
from vllm_steer.frontend.context import context_of


def workload(count: int, generated: int) -> tuple[list[Any], list[Any]]:
    """Return requests: a quarter plain, a quarter steered and captured, half captured at various positions."""
    rng = np.random.default_rng(5)
    prompts = [prompt(*rng.integers(1, VOCAB, int(rng.integers(20, 60))).tolist()) for _ in range(count)]
    wanted = []
    for i in range(count):
        fields: dict[str, Any] = {}
        if i % 4:
            positions = ("all", "last_prompt", [0, [3, 9], -2, [-1, None]], "all_generated", "all_prompt")[i % 5]
            fields["capture"] = capture(positions=positions)
        if i % 4 == 2:
            fields["steering"] = program(i)
        wanted.append(params(generated, logprobs=None, **fields))
    return prompts, wanted


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Any]:
    """Return the outputs of each request alone in an eager engine without caches."""
    with opened(tiny_llama, enable_prefix_caching=False, max_num_seqs=1) as llm:
        outputs = [run(llm, [p], [w])[0] for p, w in zip(*workload(12, 24), strict=True)]
    return outputs


def compare(outputs: list[Any], expected: list[Any]) -> None:
    for i, (got, right) in enumerate(zip(outputs, expected, strict=True)):
        assert tokens_of(got) == tokens_of(right), i
        if i % 4:
            close_to(result(got), result(right), i)
        else:
            assert got.outputs[0].capture_results is None


@pytest.mark.failure(2)
@pytest.mark.feature("continuous batching", "steer", "capture")
def test_a_mixed_batch_gives_each_request_its_own_rows(expected: list[Any], llm: Any) -> None:
    """Catches rows attributed to the wrong request of a batch although their number is right."""
    compare(run(llm, *workload(12, 24)), expected)


@pytest.mark.failure(2, control=True)
def test_comparison_detects_rows_of_a_neighbour(expected: list[Any], llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with exchanged request ids in the worker, the comparison must fail."""
    real = device_to_host.PendingRows.wait

    def exchanged(self: Any) -> Any:
        (step,) = real(self)
        names = sorted(set(step.index.request_ids))
        other = dict(zip(names, [*names[1:], *names[:1]], strict=True))
        ids = tuple(other[name] for name in step.index.request_ids)
        return (dataclasses.replace(step, index=dataclasses.replace(step.index, request_ids=ids)),)

    monkeypatch.setattr(device_to_host.PendingRows, "wait", exchanged)
    prompts, wanted = workload(12, 24)
    outputs = run(llm, prompts[1:4], wanted[1:4])
    with pytest.raises(AssertionError):
        for i, output in enumerate(outputs, 1):
            close_to(result(output), result(expected[i]))


def consumers_started_in_step(llm: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many slow consumers start while the outputs of the final step are being processed."""
    context = context_of(llm.llm_engine.output_processor)
    assert context is not None
    desk = context.capture_manager
    # Results that other tests did not wait for are not counted.
    desk._threads["memory"].submit(int).result()
    submit, deliver = desk.submit, desk._deliver
    begun: list[str] = []
    seen: list[int] = []

    def slowly(*args: Any, **kwargs: Any) -> Any:
        results = submit(*args, **kwargs)
        time.sleep(0.1)
        seen.append(len(begun))
        return results

    def noted(name: str, *args: Any) -> Any:
        begun.append(name)
        return deliver(name, *args)

    monkeypatch.setattr(desk, "submit", slowly)
    monkeypatch.setattr(desk, "_deliver", noted)
    results = [result(o) for o in run(llm, [prompt(1, 2), prompt(3, 4)], [params(3, capture=capture())] * 2)]
    assert [each.status for each in results] == ["ok"] * 2
    assert len(seen) == len(begun) == 2
    return max(seen)


def test_consumers_start_after_the_outputs_of_a_step(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches consumers that compete with output processing. Negative control: they do if nothing pauses them."""
    assert consumers_started_in_step(llm, monkeypatch) == 0
    monkeypatch.setattr(CaptureManager, "pause_consumers", lambda self: nullcontext())
    assert consumers_started_in_step(llm, monkeypatch) > 0


@pytest.mark.failure(8)
@pytest.mark.parametrize("rows", [12, 37])
@pytest.mark.feature("chunked prefill", "steer", "capture")
def test_chunked_prefill_of_any_size(tiny_llama: Path, expected: list[Any], rows: int) -> None:
    """Catches wrong positions under chunked prefill. With an arena of 12 rows, chunks have one token."""
    with opened(
        tiny_llama, max_num_batched_tokens=16, max_num_seqs=8, max_model_len=128, steering_config={"capture_rows": rows}
    ) as llm:
        compare(run(llm, *workload(12, 24)), expected)


@pytest.fixture(scope="module")
def crowded(tiny_llama: Path, expected: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    with crowded_engine(tiny_llama) as crowd:
        yield crowd


@pytest.mark.feature("preemption", "steer", "capture")
@pytest.mark.failure(9)
def test_preemption_repeats_no_row(crowded: tuple[Any, list[Any]], expected: list[Any]) -> None:
    """Catches recomputed rows that are appended twice: right shape, wrong rows."""
    llm, preempted = crowded
    compare(run(llm, *workload(12, 24)), expected)
    assert preempted
    assert llm.llm_engine.engine_core.engine_core.scheduler.steering_row_sender.num_bytes == 0


@pytest.mark.failure(9, control=True)
def test_comparison_detects_rows_joined_by_arrival(
    crowded: tuple[Any, list[Any]], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: rows joined in order of arrival belong to the wrong tokens."""
    keyed = row_assembler._choose

    def joined(chunks: Any, wanted: Any) -> Any:
        positions = keyed(chunks, wanted).positions
        return row_assembler._Chosen(positions, np.arange(len(positions)))

    monkeypatch.setattr(row_assembler, "_choose", joined)
    llm, preempted = crowded
    preempted.clear()
    outputs = run(llm, *workload(12, 24))
    assert preempted
    with pytest.raises(AssertionError):
        compare(outputs, expected)


def test_capture_larger_than_the_arena_is_refused(tiny_llama: Path) -> None:
    """Catches a request that would wait forever: one token stores 12 rows, the arena has 11."""
    refused = pytest.raises(SteeringError, match="needs 12 captured rows for one token; the engine allows 11 ")
    with opened(tiny_llama, steering_config={"capture_rows": 11}) as llm, refused:
        run(llm, [prompt(1, 2, 3)], [params(capture=capture())])


def test_server_wide_captures(tiny_llama: Path) -> None:
    """Catches a server-wide capture that misses plain requests or changes their outputs."""
    wide = {"memory": {"hooks": {"post_block": [1]}, "positions": "all_prompt"}}
    with opened(tiny_llama, capture_consumers=wide) as llm:
        plain, own = run(llm, [prompt(1, 2, 3)] * 2, [params(), params(capture=capture())])
        assert result(plain).positions("post_block", 1).tolist() == [0, 1, 2]
        assert len(result(own).sites) == 12
        assert tokens_of(plain) == tokens_of(own)


@pytest.mark.failure(20)
@pytest.mark.parametrize("policy", ["wait", "fail"])
@pytest.mark.feature("waiting for a place in the tables", "capture")
def test_capture_budget(tiny_llama: Path, policy: str) -> None:
    """Catches rows beyond the budget, and captures dropped although they should wait, or dropped silently.

    1 MiB is 4,096 rows. Each request stores up to 12 x 113, so two fit at a time.
    """
    config = {"capture_mib": 1, "capture_policy": policy}
    with opened(tiny_llama, max_model_len=128, steering_config=config) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        most = []
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            most.append(scheduler.steering_admission.reserved_rows)
            return scheduled

        scheduler.schedule = watched
        prompts = [prompt(*range(1, 110))] * 6
        outputs = run(llm, prompts, [params(5, logprobs=None, capture=capture())] * 6)
        plain = run(llm, prompts[:1], [params(5, logprobs=None)])[0]
        assert 0 < max(most) <= 4096
        assert scheduler.steering_admission.reserved_rows == 0
        found = [output.capture_results["memory"] for output in outputs]
        for output in outputs:
            assert tokens_of(output) == tokens_of(plain)
        if policy == "wait":
            assert [each.status for each in found] == ["ok"] * 6
        else:
            assert {each.status for each in found} == {"ok", "partial"}
            assert all("capture_mib" in each.error for each in found if each.status == "partial")

# SPDX-License-Identifier: Apache-2.0
"""The fuzzer on a correct engine and on two broken ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from vllm_steer.engine import scheduler as scheduler_module
from vllm_steer.engine.runner_v1 import SteeringRunnerV1
from vllm_steer.testing.fuzz.compare import Tolerance
from vllm_steer.testing.fuzz.draw import draw_requests
from vllm_steer.testing.fuzz.drive import Run
from vllm_steer.testing.fuzz.model import engine, facts_of, reference_settings, save_tiny_llama
from vllm_steer.testing.fuzz.session import Session
from vllm_steer.testing.fuzz.shrink import Comparator, shrink
from vllm_steer.testing.fuzz.workload import Request, Settings, Workload


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("tiny-llama")))


@pytest.mark.timeout(600)
@pytest.mark.feature("a mix of all that one engine does", "steer", "capture")
def test_no_finding_on_a_correct_engine(model: str) -> None:
    """Catches failures 1, 8, 9, 10 and 11: answers that depend on neighbouring requests."""
    report = Session(model, seed=25, rounds=1, requests=36).run()
    assert not report.findings, [finding.problems for finding in report.findings]
    counts = report.counts
    assert counts.engines == 4
    assert counts.requests > 90
    assert counts.plain_requests > 15
    assert counts.rows > 3000
    drawn = (counts.preempted, counts.cached_tokens, counts.aborted, counts.by_module, counts.globally, counts.streamed)
    assert min(drawn) > 0, drawn


def ignore_edits_in_block_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the engine: block hashes ignore edits."""
    monkeypatch.setattr(scheduler_module, "steering_hasher", lambda upstream, *rest: upstream)


def prompt_rows_after_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the engine: after a preemption, generated tokens count as prompt tokens."""
    original = SteeringRunnerV1._steer_bind

    def bind(self: Any, name: str, params: Any, prompt_len: int) -> None:
        bound = self.__dict__.setdefault("bound_before", set())
        original(self, name, params, prompt_len + 100 if name in bound else prompt_len)
        bound.add(name)

    monkeypatch.setattr(SteeringRunnerV1, "_steer_bind", bind)


ROOMY: dict[str, Any] = {"block_size": 32, "max_num_seqs": 8}
TIGHT: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 10, "enable_prefix_caching": False}


@dataclass(frozen=True)
class Drawn:
    """A small workload and the reference answers."""

    comparator: Comparator
    requests: list[Request]
    right: Run

    def problems(self, settings: dict[str, Any]) -> dict[str, str]:
        """Return the problems in an engine with these settings."""
        with engine(self.comparator.model, self.comparator.dtype, Settings(engine=settings)) as llm:
            return self.comparator.judge(llm, self.requests, self.right)


@pytest.fixture(scope="module")
def drawn(model: str) -> Drawn:
    with engine(model, "float32", reference_settings()) as llm:
        facts = facts_of(llm)
    requests = [
        msgspec.structs.replace(request, n=1, abort_after=None)
        for request in draw_requests(np.random.default_rng(3), 16, facts)
    ]
    comparator = Comparator(model, "float32", facts.hidden, Tolerance.of("float32"))
    return Drawn(comparator, *comparator.references(requests))


@pytest.mark.failure(1, control=True)
@pytest.mark.timeout(600)
def test_block_hashes_without_edits_are_found_and_shrunk(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the fuzzer finds the failure and keeps only the requests that it needs."""
    ignore_edits_in_block_hashes(monkeypatch)
    assert drawn.problems(ROOMY)
    workload = Workload(settings=Settings(engine=ROOMY), requests=drawn.requests)
    small = shrink(drawn.comparator, workload, drawn.right, passes=1)
    assert len(small.requests) <= 4
    assert len(small.to_json()) < len(workload.to_json()) / 4
    assert drawn.comparator.replay(Workload.from_json(small.to_json()))


@pytest.mark.failure(9, control=True)
def test_wrong_rows_after_preemption_are_found(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: these settings fail only because of the preemption."""
    prompt_rows_after_preemption(monkeypatch)
    assert drawn.problems(TIGHT)

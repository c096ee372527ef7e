# SPDX-License-Identifier: Apache-2.0
"""Projections computed in the worker, against projections of the full rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.answers import params, prompt, run
from tests.engine.captures import result
from tests.tiny import HIDDEN
from vllm_steer.engine.model_output import rows_of
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.row_sender import RowSender
from vllm_steer.request import Projection

SITES = {"hooks": {"post_block": [0, 2], "pre_attn": [1]}, "positions": "all"}
EDIT = [{"kind": "add", "point": "pre_attn", "layers": 1, "vector": [3.0] * HIDDEN}]


def directions(seed: int, count: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype("f4")


def requests(number: int, **spec: Any) -> Any:
    """Return prompts and parameters; every second request captures rows ahead of an edit."""
    return params(
        8, logprobs=None, steering=EDIT, capture={"memory": {**SITES, "before": bool(number % 2), **spec}}
    )  # fmt: skip


PROMPTS = [prompt(*range(10 * i + 1, 11 * i + 9)) for i in range(6)]


def assert_projections(llm: Any) -> None:
    """Check six requests in one batch with three projections, and two with full rows, against each run alone."""
    whole = [run(llm, [p], [requests(i)])[0] for i, p in enumerate(PROMPTS)]
    mixed = [requests(i) if i > 3 else requests(i, reduce={"directions": directions(i // 2)}) for i in range(6)]
    for i, (got, right) in enumerate(zip(run(llm, PROMPTS, mixed), whole, strict=True)):
        for site in result(right).sites:
            rows = result(right).tensor(*site)
            expected = rows if i > 3 else rows @ torch.from_numpy(directions(i // 2)).T
            assert result(got).positions(*site).tolist() == result(right).positions(*site).tolist()
            torch.testing.assert_close(result(got).tensor(*site), expected, atol=5e-3, rtol=1e-3)


def test_projections_in_a_mixed_batch_equal_projected_rows(llm: Any) -> None:
    """Catches directions of another request, rows of another site, and rows after an edit instead of before."""
    assert_projections(llm)


def test_comparison_detects_wrong_directions(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with reordered directions, the comparison must fail."""
    real = ProgramStore.directions
    monkeypatch.setattr(ProgramStore, "directions", lambda self, digest: real(self, digest).flip(0))
    with pytest.raises(AssertionError):
        assert_projections(llm)


def test_worker_sends_k_numbers_per_row(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches projections computed in the front end, except those with many directions."""
    sent: list[tuple[int, bytes]] = []
    collect = RowSender.collect

    def watched(self: Any, model_output: Any, requests: Any) -> None:
        sent.extend((step.rows.shape[1], step.index.projection) for step in rows_of(model_output))
        collect(self, model_output, requests)

    monkeypatch.setattr(RowSender, "collect", watched)
    few, many = Projection(directions(1)), Projection(directions(1, HIDDEN))
    assert few.in_engine and not many.in_engine
    whole = run(llm, PROMPTS[:1], [requests(0)])[0]
    for projection, expected in ((few, {(4 * 5, few.digest)}), (many, {(4 * HIDDEN, b"")})):
        sent.clear()
        found = run(llm, PROMPTS[:1], [requests(0, reduce=projection)])[0]
        assert set(sent) == expected
        right = result(whole).tensor("post_block", 2) @ torch.from_numpy(projection.directions.copy()).T
        torch.testing.assert_close(result(found).tensor("post_block", 2), right, atol=5e-3, rtol=1e-3)


def test_budget_counts_projected_sizes(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches projections counted as full rows, and directions whose table entries are never freed."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    booked: list[tuple[int, int]] = []
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        booked.append((scheduler.steering_admission.reserved_rows, scheduler.steering_allocator.in_use[2]))
        return scheduled

    monkeypatch.setattr(scheduler, "schedule", watched)
    length = len(PROMPTS[0]["prompt_token_ids"]) + 7
    for spec, most in (({}, 3 * length), ({"reduce": {"directions": directions(3)}}, -(-3 * length * 5 // HIDDEN))):
        booked.clear()
        run(llm, PROMPTS[:1], [requests(0, **spec)])
        # One vector of the edit and five directions.
        assert max(booked) == (most, 6 if spec else 1)
    assert scheduler.steering_allocator.in_use == (0, 0, 0, 0)

# SPDX-License-Identifier: Apache-2.0
"""Tests of when the row assignment on the device is reused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import logprobs_of, params, prompt, run
from tests.tiny import direction
from vllm_steer import Edit
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.engine.worker_manager import WorkerSteeringManager

STEP: dict[str, Any] = {
    "version": 4, "num_padded": 8, "request_slot": np.array([3, 0, 5], np.int32), "count": np.array([1, 1, 1]),
    "in_last_segments": True,
}  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"version": 5},
    {"num_padded": 16},
    {"request_slot": np.array([3, 5, 0], np.int32)},
    {"count": np.array([1, 2, 1])},
    {"request_slot": np.array([3, 0], np.int32), "count": np.array([1, 1])},
    {"in_last_segments": False},
]


def keeps_rows(
    manager: Any, version: int, num_padded: int, request_slot: Any, count: Any, *, in_last_segments: bool
) -> bool:
    layout: Any = None
    manager.store.changes = version
    batch = StepBatch(layout, [], request_slot, count, count, num_padded)
    return WorkerSteeringManager._keeps_rows(manager, batch, in_last_segments=in_last_segments)


@pytest.fixture
def manager() -> Any:
    return SimpleNamespace(store=SimpleNamespace(), _assigned=None)


def test_equal_steps_reuse_the_assignment(manager: Any) -> None:
    """Catches an assignment that is never reused, or reused after an idle step cleared it."""
    assert [keeps_rows(manager, **STEP) for _ in range(3)] == [False, True, True]
    manager._assigned = None
    assert [keeps_rows(manager, **STEP) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_different_steps_do_not(manager: Any, other: dict[str, Any]) -> None:
    """Catches rows of another batch that are reused, also in the step after it."""
    keeps_rows(manager, **STEP)
    assert not keeps_rows(manager, **{**STEP, **other})
    assert not keeps_rows(manager, **STEP)


def run_changing_batch(llm: Any) -> list[list[np.ndarray]]:
    """Return logprobs of requests whose rows change while they decode, batched and alone."""
    edits: list[list[Edit]] = [
        [],
        [Edit(kind="add", point="post_block", layers=[1], vector=direction(61))],
        [Edit(kind="add", point="post_block", layers=[1], vector=direction(62), tokens=[(14, 17)])],
        [Edit(kind="add", point="post_block", layers=[1], vector=direction(63), tokens="prompt")],
        [Edit(kind="add", point="pre_attn", layers=[2], vector=direction(64), tokens="generated")],
    ]
    prompts = [prompt(*range(20 + i, 30 + 2 * i)) for i in range(len(edits))]
    asked = [params(4 + 3 * i, **({"steering": each} if each else {})) for i, each in enumerate(edits)]
    together = run(llm, prompts, asked)
    alone = [run(llm, [p], [a])[0] for p, a in zip(prompts, asked, strict=True)]
    return [[np.array(logprobs_of(each)) for each in answers] for answers in (together, alone)]


def test_reuse_does_not_change_outputs(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an assignment that is reused too long while edits and requests start and end.

    Negative control: always reusing it changes the outputs.
    """
    launched: list[int] = []
    real = WorkerSteeringManager._assign_rows

    def counted(self: Any, *args: Any) -> None:
        launched.append(1)
        real(self, *args)

    monkeypatch.setattr(WorkerSteeringManager, "_assign_rows", counted)
    together, alone = run_changing_batch(llm)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    kept = len(launched)
    launched.clear()
    never: Callable[..., bool] = lambda self, *args, **kwargs: False  # noqa: E731
    monkeypatch.setattr(WorkerSteeringManager, "_keeps_rows", never)
    run_changing_batch(llm)
    assert kept < 0.7 * len(launched)

    def always(self: Any, *args: Any, **kwargs: Any) -> bool:
        self._assigned, before = "rows", self._assigned
        return before is not None

    monkeypatch.setattr(WorkerSteeringManager, "_keeps_rows", always)
    together, _ = run_changing_batch(llm)
    with pytest.raises(AssertionError):
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)

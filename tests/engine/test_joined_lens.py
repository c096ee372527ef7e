# SPDX-License-Identifier: Apache-2.0
"""Rows of a lens that are computed with the logits that the step samples from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_steer.engine.head_readouts import HeadReadouts, _Group
from vllm_steer.taps.heads import LensHead
from vllm_steer.taps.ops import DeviceOps

HIDDEN, VOCAB, ROWS, K = 8, 40, 3, 2


class Model(nn.Module):
    """Model with an unembedding that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.randn(HIDDEN, VOCAB)
        self.calls: list[int] = []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(hidden))
        return hidden @ self.weights


def planned(model: Model, joins: bool) -> tuple[HeadReadouts, torch.Tensor]:
    """Return readouts of one group whose step has run, and the record that it writes."""
    tables = SimpleNamespace(
        arena=torch.randn(5, HIDDEN), record=torch.zeros(4, 2 * K + 1), replayed=torch.tensor([0, 1, 0, 0])
    )
    store: Any = SimpleNamespace(tables=tables)
    head = LensHead(lambda rows: 3 * rows, model.compute_logits, VOCAB)
    heads = HeadReadouts(store, {"lens": head}, DeviceOps(), enabled=True, speculative=False)
    heads.joins = joins
    group = _Group(head, K, torch.tensor([4, 0, 2]), torch.tensor([0, 1, 3]), torch.ones(ROWS, dtype=torch.int64))
    heads._planned = (group,), torch.zeros(4)
    heads.run()
    expected = torch.zeros(4, 2 * K + 1)
    values, ids = (3 * tables.arena[[4, 0, 2]] @ model.weights).log_softmax(-1).topk(K)
    for row, token in ((0, 0), (2, 3)):
        # The record of token 1 was computed before a preemption.
        expected[token, 1:] = torch.cat([ids[row].float(), values[row]])
    return heads, torch.stack([tables.record, expected])


@pytest.mark.parametrize("called", [True, False], ids=["joined", "no logits"])
def test_waiting_rows_are_computed_once(called: bool) -> None:
    """Catches readouts that are lost where a step samples nothing, a second product, and logits of another row."""
    model = Model()
    heads, _ = planned(model, joins=True)
    record = heads._store.tables.record
    assert heads.waiting and not record.any() and model.calls == []
    hidden = torch.randn(2, HIDDEN)
    with heads.joined(model):
        logits = model.compute_logits(hidden) if called else hidden @ model.weights
    torch.testing.assert_close(logits, hidden @ model.weights)
    assert model.calls == ([2 + ROWS] if called else [ROWS]) and not heads.waiting
    assert "compute_logits" not in vars(model)
    rows = 3 * heads._store.tables.arena[[4, 2]]
    values, ids = (rows @ model.weights).log_softmax(-1).topk(K)
    torch.testing.assert_close(record[[0, 3], 1:], torch.cat([ids.float(), values], dim=1))
    assert not record[[1, 2]].any()


def test_without_a_runner_that_joins_nothing_waits() -> None:
    """Catches readouts of runner V1 that wait for logits which are computed elsewhere."""
    model = Model()
    heads, both = planned(model, joins=False)
    assert not heads.waiting and model.calls == [ROWS]
    torch.testing.assert_close(heads._store.tables.record, both[1])


def test_more_rows_than_fit_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches logits of a long prompt that take more memory than the bound."""
    monkeypatch.setattr("vllm_steer.taps.heads.OUTPUT_BYTES", 4 * VOCAB * (ROWS - 1))
    model = Model()
    heads, both = planned(model, joins=True)
    assert not heads.waiting and model.calls == [ROWS - 1, 1]
    torch.testing.assert_close(heads._store.tables.record, both[1])

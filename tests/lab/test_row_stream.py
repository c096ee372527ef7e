# SPDX-License-Identifier: Apache-2.0
"""Rows for training as an engine computes them: each row once, with its text, in a known order."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.lab.hf import Hooked
from tests.tiny import VOCAB
from vllm_steer import SteeringError
from vllm_steer.lab import RowBatch, RowStream, text_rows

RANDOM = np.random.default_rng(9)
TEXTS = [RANDOM.integers(0, VOCAB, RANDOM.integers(2, 12)).tolist() for _ in range(30)]
ORDER = [(number, position) for number, text in enumerate(TEXTS) for position in range(1, len(text))]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_rows, "_MOST_TEXTS", 4)


def order_of(batches: list[RowBatch]) -> list[tuple[int, int]]:
    return [pair for each in batches for pair in zip(each.texts.tolist(), each.positions.tolist(), strict=True)]


@pytest.mark.parametrize("shuffle", [0, 1, 40, 10_000])
@pytest.mark.parametrize("batch_size", [1, 7, 10_000])
def test_each_row_comes_once(llm: Any, folder: Path, batch_size: int, shuffle: int) -> None:
    """Catches rows that are lost or doubled where batches of texts meet or the texts end, and rows of another text."""
    batches = list(RowStream(llm, TEXTS, layer=2, batch_size=batch_size, shuffle=shuffle))
    order = order_of(batches)
    assert sorted(order) == ORDER and (order == ORDER) == (not shuffle)
    sizes = [len(each.rows) for each in batches]
    assert all(size == batch_size for size in sizes[:-1]) and 0 < sizes[-1] <= batch_size
    hooked = Hooked(folder)
    right = np.stack([hooked.run(TEXTS[number])[2, position] for number, position in order])
    np.testing.assert_allclose(torch.cat([each.rows for each in batches]).numpy(), right, rtol=1e-3, atol=1e-4)


def test_orders_differ_and_are_repeated(llm: Any) -> None:
    """Catches an epoch in the order of the first, an order that the seed does not fix, and texts in file order."""
    first, again = (RowStream(llm, TEXTS, layer=2, shuffle=20, batch_size=5, seed=3) for _ in range(2))
    orders = [order_of(list(each)) for each in (first, first, again, again)]
    assert orders[:2] == orders[2:] and orders[0] != orders[1]
    other = order_of(list(RowStream(llm, TEXTS, layer=2, shuffle=20, batch_size=5, seed=4)))
    assert other not in orders and sorted(other) == ORDER
    assert {number for number, _ in orders[0][:20]} - set(range(12)), "only rows of the first texts"


def test_the_loop_can_use_the_engine_and_stop(llm: Any) -> None:
    """Catches texts that run before they are needed, and an engine that is busy while the loop has a batch."""
    stream, ran = RowStream(llm, TEXTS, layer=2, batch_size=3), llm.llm_engine.output_processor.request_states
    loader = iter(DataLoader(stream, batch_size=None))
    first = next(loader)
    assert isinstance(first, RowBatch) and not ran
    (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], use_tqdm=False)
    assert output.prompt_token_ids == [1, 2]
    assert order_of([first, *loader]) == ORDER
    next(iter(stream))  # and no more of it
    assert order_of(list(stream)) == ORDER


def test_an_error_of_the_engine_is_raised_in_the_loop(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stream that ends as if there were no more texts."""
    rows_of, calls = text_rows.rows_of_prompt, [0]

    def failing(output: Any) -> Any:
        calls[0] += 1
        if calls[0] == 9:
            raise RuntimeError("the engine has ended")
        return rows_of(output)

    monkeypatch.setattr(text_rows, "rows_of_prompt", failing)
    seen = []
    with pytest.raises(SteeringError, match=r"texts\[8\]: the engine failed: the engine has ended"):
        seen += [each.texts for each in DataLoader(RowStream(llm, TEXTS, layer=2, batch_size=1), batch_size=None)]
    assert calls[0] == 9


def test_what_cannot_be_streamed(llm: Any) -> None:
    """Catches worker processes that wait for an engine that they do not have, and errors after the first batch."""
    stream = RowStream(llm, TEXTS, layer=2)
    with pytest.raises(SteeringError, match=r"num_workers: must be 0 for a RowStream.*harvest to files"):
        pickle.dumps(stream)
    with pytest.raises(RuntimeError, match=r"num_workers.*must be 0 for a RowStream"):
        next(iter(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork")))
    for changed, message in (
        ({"layer": 4}, "layers: 4 is not a layer of"),
        ({"layer": "all"}, "layer: must be one layer such as 12, not 'all'"),
        ({"batch_size": 0}, "batch_size: must be 1 to"),
        ({"shuffle": -1}, "shuffle: must be 0 to"),
        ({"seed": -1}, "seed: must be 0 to"),
        ({"texts": [*TEXTS, [1]]}, r"texts\[30\]: has 1 tokens, and none at the positions"),
    ):
        with pytest.raises(SteeringError, match=message):
            RowStream(llm, **{"texts": TEXTS, "layer": 2, **changed})

# SPDX-License-Identifier: Apache-2.0
"""Rows of texts for training, as an engine computes them: without files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from vllm_steer.errors import SteeringError
from vllm_steer.lab.text_rows import TextRows, Texts, read_layer
from vllm_steer.registry.directions import WITHOUT_FIRST
from vllm_steer.request.scalars import read_integer

_MOST_ROWS = 1 << 30


class RowBatch(NamedTuple):
    """Rows of one site, with what they belong to."""

    rows: torch.Tensor
    """``[rows, hidden]`` on the CPU."""
    texts: torch.Tensor
    """Number of each row's text among those given, int64 ``[rows]``, for instance to attach labels."""
    positions: torch.Tensor
    """Position of each row in its text, int64 ``[rows]``."""

    def take(self, order: slice | torch.Tensor) -> RowBatch:
        """Return some of the rows."""
        return RowBatch(*(each[order] for each in self))


class RowStream(IterableDataset[RowBatch]):
    """Batches of rows for a training loop, computed while it asks for them: each row once per iteration.

    The engine and the loop take turns, so the loop may use the engine as well. At most ``shuffle`` rows and those of a
    batch of texts are in memory. An error of the engine is raised in the loop.

    Examples:
        >>> stream = RowStream(llm, texts, layer=12, batch_size=512, shuffle=50_000)  # doctest: +SKIP
        >>> for rows, texts, positions in stream:  # or DataLoader(stream, batch_size=None)  # doctest: +SKIP
        ...     loss = model(rows.float().to(device))
    """

    def __init__(
        self,
        llm: Any,
        texts: Texts,
        *,
        layer: int,
        point: str = "post_block",
        positions: Any = WITHOUT_FIRST,
        dtype: Any = None,
        answer: bool = False,
        truncate: bool = False,
        batch_size: int = 512,
        shuffle: int = 0,
        seed: int = 0,
    ) -> None:
        """Read and check all texts.

        Args:
            llm: An `LLM` with steering, in this process.
            texts: A file of texts or an iterable; see `read_texts`.
            layer: Layer.
            point: Hook point.
            positions: Tokens of each text, as in a capture spec: all but the first by default.
            dtype: Dtype of the rows; the model's by default.
            answer: Whether conversations end with the tokens that begin an answer.
            truncate: Whether to use the beginning of texts that are too long for the model, instead of refusing them.
            batch_size: Rows of each batch; the last one of an iteration may have fewer.
            shuffle: Rows among which each row is drawn. Texts then run in random order, too, another one in each
                iteration. By default, rows are in the order of the texts.
            seed: Seed of the order.

        Raises:
            SteeringError: An argument is invalid for the model, or a text is too long or has no token at the positions.
        """
        self.batch_size = read_integer(batch_size, 1, _MOST_ROWS, "batch_size")
        self.shuffle = read_integer(shuffle, 0, _MOST_ROWS, "shuffle")
        self.seed = read_integer(seed, 0, 2**63 - 1, "seed")
        self._rows = TextRows(
            llm, texts, point=point, layers=read_layer(layer), positions=positions,
            dtype=dtype, answer=answer, truncate=truncate,
        )  # fmt: skip
        self._iterations = 0

    def __iter__(self) -> Iterator[RowBatch]:
        """Run the texts.

        Raises:
            SteeringError: The engine failed, or a worker process iterates, which does not have the engine.
        """
        if get_worker_info() is not None:
            self._refuse_workers()
        random = np.random.default_rng((self.seed, self._iterations))
        self._iterations += 1
        return self._batches(random)

    def __getstate__(self) -> NoReturn:
        self._refuse_workers()

    def _refuse_workers(self) -> NoReturn:
        problem = "must be 0 for a RowStream, because the engine is in this process"
        raise SteeringError("num_workers", f"{problem}; harvest to files for worker processes")

    def _batches(self, random: np.random.Generator) -> Iterator[RowBatch]:
        numbers = np.arange(len(self._rows))
        if self.shuffle:
            random.shuffle(numbers)
        held: RowBatch | None = None
        for batch in self._rows.split(numbers.tolist()):
            new = [self._read(each) for captured in self._rows.batches([batch]) for each in captured]
            joined = RowBatch(*map(torch.cat, zip(*([held] if held else []) + new, strict=True)))
            ready = max(0, len(joined.rows) - self.shuffle) // self.batch_size * self.batch_size
            if self.shuffle:
                joined = joined.take(torch.from_numpy(random.permutation(len(joined.rows))))
            yield from self._cut(joined.take(slice(ready)))
            held = joined.take(slice(ready, None))
        if held:
            yield from self._cut(held)

    def _read(self, captured: Any) -> RowBatch:
        site = self._rows.point, self._rows.layers[0]
        rows, positions = captured.tensor(*site), captured.positions(*site)
        return RowBatch(rows, torch.full((len(rows),), int(captured.request_id)), positions)

    def _cut(self, rows: RowBatch) -> Iterator[RowBatch]:
        for start in range(0, len(rows.rows), self.batch_size):
            yield rows.take(slice(start, start + self.batch_size))

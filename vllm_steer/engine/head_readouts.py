# SPDX-License-Identifier: Apache-2.0
"""Readouts that are computed from rows of the arena after the forward pass, and written to the records of a step.

These are the largest outputs of heads, and probes with a hidden layer.

The rows are stored by CAPTURE instructions, like captured rows, but do not leave the device. While the batch does not
change, a step launches the same indices again.

Reading the unembedding takes most of the time of a lens. Where the runner allows it, the rows of a lens therefore wait
until the step computes the logits that it samples from, and are computed by the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from cachetools import LRUCache

from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.log import steering_logger
from vllm_steer.program.token_program import HeadRead, MlpRead
from vllm_steer.taps.heads import Head, LensHead, Places, chosen_outputs, parts
from vllm_steer.taps.mlp_head import MlpHead
from vllm_steer.taps.ops import DeviceOps
from vllm_steer.taps.tables import OPEN_END, Tables, upload

logger = steering_logger(__name__)

_MAX_MLPS = 32
"""Probes with a hidden layer whose weights are kept on the device beside the vector table."""
_Part = tuple[npt.NDArray[np.int64], ...]


@dataclass(frozen=True)
class _Group:
    """Rows of a step that one head reads with one ``k`` or the same targets, or one probe; int64 on the device."""

    head: Head | MlpHead
    top_k: int
    arena_rows: torch.Tensor
    """``[rows]``. With speculative decoding ``[segments, 3, rows]``: start and end of each segment that the token may
    be in, and the place of the row among the rows of the token."""
    tokens: torch.Tensor
    """``[rows]``, the token of each row."""
    columns: torch.Tensor
    """``[rows]``, the first column of its record."""
    targets: torch.Tensor | None = None
    """``[top_k]``, the outputs that are recorded; None for the largest."""

    def rows(self, tables: Tables, position: torch.Tensor) -> tuple[torch.Tensor, Places]:
        """Return the arena rows and the places of their readouts. Records of tokens without a row keep their values."""
        token = self.tokens
        kept = tables.replayed[token] != 0
        if self.arena_rows.ndim == 1:
            return self.arena_rows, Places(token, self.columns, kept)
        start, stop, place = self.arena_rows.unbind(1)
        inside = (position[token] >= start) & (position[token] < stop)
        found = inside.any(0)
        rows = torch.where(found, tables.token_base[token] + torch.where(inside, place, 0).sum(0), 0)
        return rows, Places(token, self.columns, kept | ~found)


class _Waiting(NamedTuple):
    """Normed rows of a lens that wait for the step's logits."""

    group: _Group
    normed: torch.Tensor
    places: Places


class HeadReadouts:
    """Head readouts of one engine rank.

    Args:
        store: The rank's programs.
        heads: Heads by the names that programs use.
        ops: Functions for the rank's device.
        enabled: Whether this rank returns records. Other ranks run collective heads, and probes, on which gates may
            depend.
        speculative: Whether draft tokens make the host's positions uncertain.
    """

    def __init__(
        self, store: ProgramStore, heads: Mapping[str, Head], ops: DeviceOps, *, enabled: bool, speculative: bool
    ) -> None:
        self.heads = heads
        self.joins = False
        """Whether the runner computes the logits of each step inside of :meth:`joined`."""
        self._ops = ops
        self._waiting: list[_Waiting] = []
        self._store = store
        self._enabled = enabled
        self._speculative = speculative
        self._key: tuple[int, tuple[str, ...], bytes, bytes] | None = None
        self._steady: tuple[_Group, ...] = ()
        self._planned: tuple[tuple[_Group, ...], torch.Tensor] | None = None
        self._mlps: LRUCache[MlpRead, MlpHead] = LRUCache(_MAX_MLPS)

    def plan(self, batch: StepBatch, capturing: npt.NDArray[np.int64]) -> None:
        """Choose the rows that the heads read after the next forward pass.

        Args:
            batch: The step's batch.
            capturing: Indices of the requests in the batch that store rows in this step.
        """
        if not self._store.num_with_heads:
            return
        slots = batch.request_slot[capturing]
        reached = batch.first[capturing] + batch.count[capturing] * self._speculative
        if not (reached >= self._store.last_segment[slots] + self._speculative).all():
            groups = self._groups(batch, capturing)
        else:
            # A request that starts to read, such as one whose prompt has ended, changes neither ids nor counts.
            key = self._store.changes, tuple(batch.ids), batch.count.tobytes(), capturing.tobytes()
            if key != self._key:
                self._steady, self._key = self._groups(batch, capturing), key
            groups = self._steady
        self._planned = groups, batch.layout().position

    def _groups(self, batch: StepBatch, capturing: npt.NDArray[np.int64]) -> tuple[_Group, ...]:
        found = self._possible_rows(batch, capturing) if self._speculative else self._rows(batch, capturing)
        parts: dict[tuple[str | MlpRead, int, tuple[int, ...]], list[_Part]] = {}
        for head, part in found:
            if not self._enabled and head.mlp is None and head.head not in self.heads:
                # An autoencoder, which only the rank that returns records has.
                continue
            parts.setdefault((head.mlp or head.head, head.top_k, head.targets), []).append(part)
        return tuple(
            self._group(self._head(name), top_k, targets, each) for (name, top_k, targets), each in parts.items()
        )

    def _head(self, name: str | MlpRead) -> Head | MlpHead:
        if isinstance(name, str):
            return self.heads[name]
        if name not in self._mlps:
            self._mlps[name] = self._store.mlp_head(name)
        return self._mlps[name]

    def _rows(self, batch: StepBatch, capturing: npt.NDArray[np.int64]) -> Iterator[tuple[HeadRead, _Part]]:
        """Return the arena rows, tokens and first columns of each run of tokens."""
        starts = np.cumsum(batch.count) - batch.count
        base = 0
        for index in capturing.tolist():
            first, token = int(batch.first[index]), int(starts[index])
            resolved = self._store.resolved_of(batch.ids[index])
            for start, stop, segment in resolved.spans(first, first + int(batch.count[index])):
                offsets = np.arange(stop - start)
                stored = segment.num_captures
                for head, place in () if segment.program is None else segment.program.heads:
                    yield head, (base + offsets * stored + place, token + offsets, np.full(len(offsets), head.column))
                base += len(offsets) * stored
                token += len(offsets)

    def _possible_rows(self, batch: StepBatch, capturing: npt.NDArray[np.int64]) -> Iterator[tuple[HeadRead, _Part]]:
        """Return places, tokens, first columns and segments of each run of tokens that may store rows.

        The host's positions are upper bounds, so every segment up to them is possible.
        """
        starts = np.cumsum(batch.count) - batch.count
        for index in capturing.tolist():
            count = int(batch.count[index])
            stop = int(batch.first[index]) + count
            found: dict[HeadRead, list[tuple[int, int, int]]] = {}
            for start, end, segment in self._store.resolved_of(batch.ids[index]).spans(0, stop):
                for head, place in () if segment.program is None else segment.program.heads:
                    # The last segment that is reached may go on.
                    found.setdefault(head, []).append((start, OPEN_END if end == stop else end, place))
            for head, segments in found.items():
                token = starts[index] + np.arange(count)
                yield head, (np.array(segments), token, np.full(count, head.column))

    def _group(self, head: Head | MlpHead, top_k: int, targets: tuple[int, ...], parts: list[_Part]) -> _Group:
        rows, tokens, columns = zip(*parts, strict=True)
        if self._speculative:
            # Segments that do not exist are empty.
            most = max(map(len, rows))
            arena_rows = np.concatenate(
                [
                    np.repeat(np.pad(each, ((0, most - len(each)), (0, 0)))[:, :, None], len(token), axis=2)
                    for each, token in zip(rows, tokens, strict=True)
                ],
                axis=2,
            )
        else:
            arena_rows = np.concatenate(rows)
        return _Group(
            head,
            top_k,
            self._upload(arena_rows),
            self._upload(np.concatenate(tokens)),
            self._upload(np.concatenate(columns)),
            self._upload(np.array(targets)) if targets else None,
        )

    def _upload(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(numbers)), self._store.tables.device)

    @property
    def waiting(self) -> bool:
        """Whether readouts of the step are not computed yet, because they wait for its logits."""
        return bool(self._waiting)

    def warm_up(self) -> None:
        """Compile the kernels of all heads. All ranks call this."""
        for name, head in self.heads.items():
            try:
                self._ops.warm_up_head(head)
            # The methods belong to the model; the self-check refuses the lens, with the reason.
            except Exception as failure:
                logger.debug("The head %s cannot be run on rows: %s", name, failure)

    def run(self) -> None:
        """Compute the planned readouts, after the forward pass and on the same stream."""
        planned, self._planned = self._planned, None
        self._waiting = []
        if planned is None:
            return
        groups, position = planned
        tables = self._store.tables
        for group in groups:
            head = group.head
            if not (self._enabled or isinstance(head, MlpHead) or head.collective):
                continue
            rows, places = group.rows(tables, position)
            stream = tables.arena.index_select(0, rows)
            if isinstance(head, MlpHead):
                places.write(tables.record, head.values(stream))
            elif isinstance(head, LensHead) and self.joins and self._fits(head, len(rows), stream.element_size()):
                self._waiting.append(_Waiting(group, head.norm(stream), places))
            else:
                for first, stop in parts(head, len(rows), stream.element_size()):
                    self._record(group, head.products(stream[first:stop]), places.part(first, stop))

    def _fits(self, head: LensHead, rows: int, itemsize: int) -> bool:
        """Return whether all waiting rows and ``rows`` further ones are one part."""
        return len(parts(head, rows + sum(len(each.normed) for each in self._waiting), itemsize)) == 1

    def _record(self, group: _Group, products: torch.Tensor | None, places: Places) -> None:
        if products is None or isinstance(group.head, MlpHead):
            return
        record = self._store.tables.record
        if group.targets is not None:
            places.write(record, chosen_outputs(products, group.targets))
        else:
            self._ops.record_top_k(record, places, products, group.head.activation, group.top_k)

    @contextmanager
    def joined(self, model: Any) -> Iterator[None]:
        """Compute the waiting rows with the logits that are computed inside of the context, or else at its end.

        Args:
            model: The model, whose ``compute_logits`` is called.
        """
        if not self._waiting:
            yield
            return
        original, own = model.compute_logits, vars(model).get("compute_logits")
        model.compute_logits = self._with_waiting(original)
        try:
            yield
        finally:
            if own is None:
                vars(model).pop("compute_logits")
            else:
                model.compute_logits = own
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._record(each.group, original(each.normed), each.places)

    def _with_waiting(self, original: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., Any]:
        def compute_logits(hidden: torch.Tensor) -> torch.Tensor | None:
            waiting = self._waiting
            if not waiting or any(each.normed.dtype != hidden.dtype for each in waiting):
                return original(hidden)
            self._waiting = []
            logits = original(torch.cat([hidden, *(each.normed for each in waiting)]))
            if logits is None:
                return None
            first = len(hidden)
            for each in waiting:
                stop = first + len(each.normed)
                self._record(each.group, logits[first:stop], each.places)
                first = stop
            return logits[: len(hidden)]

        return compute_logits

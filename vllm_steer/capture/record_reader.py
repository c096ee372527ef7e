# SPDX-License-Identifier: Apache-2.0
"""Records of one running sample as Python lists or as JSON, for a reader that streams them.

A record is the row of numbers that the engine keeps for a token (:mod:`vllm_steer.program.records`). A stream reads one
or a few records at a time, for which lists are faster than arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_receiver import RowReceiver

Record: TypeAlias = list[float]
RecordRun: TypeAlias = tuple[int, Sequence[Record]]
"""First position, and the records of consecutive positions."""


class RecordReader:
    """Reader of the records of one sample; every position is returned once, in order.

    Args:
        receiver: Buffers the records of all requests.
        assembler: Collects the rows of this request.
        request_id: The engine's id of the request.
        shared: Whether the assembler needs the request's rows as well, because the request captures.
    """

    def __init__(self, receiver: RowReceiver, assembler: RowAssembler, request_id: str, *, shared: bool) -> None:
        self._receiver = receiver
        self._assembler = assembler
        self._request_id = request_id
        self._shared = shared
        self._next_chunk = self._next_position = 0
        self._waiting: list[RecordRun] = []

    def take(self, forwarded: int) -> tuple[list[int], list[Record]]:
        """Return the new positions before ``forwarded``, ascending, and their records.

        Records from ``forwarded`` on belong to draft tokens, or to tokens whose output is yet to be processed. They are
        kept: a position that is computed again replaces its record.
        """
        runs = self._waiting
        if self._shared:
            self._receiver.flush(self._request_id)
        if self._assembler.num_chunks > self._next_chunk:
            collected, self._next_chunk = self._assembler.records_since(self._next_chunk)
            runs += collected
        if not self._shared:
            runs += self._receiver.take_records(self._request_id)
        self._waiting = []
        first = self._next_position
        if len(runs) == 1 and first <= runs[0][0] == forwarded - 1 and len(runs[0][1]) == 1:
            self._next_position = forwarded
            return [forwarded - 1], list(runs[0][1])
        self._next_position = max(first, forwarded)
        if len(runs) > 1:
            runs = _merge(runs)
        positions: list[int] = []
        records: list[Record] = []
        for start, run in runs:
            stop = start + len(run)
            low, high = max(start, first), min(stop, forwarded)
            if low < high:
                positions += range(low, high)
                records += run[low - start : high - start]
            if stop > forwarded:
                kept = max(start, forwarded)
                self._waiting.append((kept, run[kept - start :]))
        return positions, records

    def take_json(self, forwarded: int) -> list[bytes] | None:
        """Return each number of the record before ``forwarded`` as JSON, if no other record is new; otherwise None."""
        position = forwarded - 1
        if self._shared or self._waiting or position < self._next_position:
            return None
        if self._assembler.num_chunks > self._next_chunk:
            return None
        found = self._receiver.take_record_json(self._request_id, position)
        if found is not None:
            self._next_position = forwarded
        return found


def _merge(runs: Sequence[RecordRun]) -> list[RecordRun]:
    """Return runs in ascending order without overlaps; the last record of a position counts."""
    if all(start + len(run) == runs[i + 1][0] for i, (start, run) in enumerate(runs[:-1])):
        return [(runs[0][0], [record for _, run in runs for record in run])]
    by_position: dict[int, Record] = {}
    for start, run in runs:
        by_position.update(zip(range(start, start + len(run)), run, strict=True))
    merged: list[tuple[int, list[Record]]] = []
    for position in sorted(by_position):
        if not merged or merged[-1][0] + len(merged[-1][1]) != position:
            merged.append((position, []))
        merged[-1][1].append(by_position[position])
    return list(merged)

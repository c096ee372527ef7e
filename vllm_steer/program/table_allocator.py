# SPDX-License-Identifier: Apache-2.0
"""The books of the device tables: which rows, instructions and vectors are in use, and by how many requests.

The scheduler keeps one ledger to decide admission, and every worker one to place what was admitted. No content needs
neighbouring places (instructions are linked, not packed), so counts alone decide whether something fits, and the two
kinds of ledger cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_steer.program.resolve import TokenProgram


@dataclass
class _Held:
    place: int
    users: int


@dataclass
class PlacedRow:
    """A row that the device does not hold yet, and the places it was given."""

    row: TokenProgram
    place: int
    instruction_places: list[int]


class TableAllocator:
    """Reference counts and free places. Row 0 and instruction 0 mean "nothing" and are never given out."""

    def __init__(self, max_rows: int, max_instructions: int, max_vectors: int) -> None:
        self._max_instructions = max_instructions
        self._free_rows = list(range(max_rows, 0, -1))
        self._free_instructions = list(range(max_instructions, 0, -1))
        self._free_vectors = list(range(max_vectors - 1, -1, -1))
        self._rows: dict[bytes, _Held] = {}
        self._vectors: dict[bytes, _Held] = {}
        self._instructions_of: dict[bytes, list[int]] = {}

    def fits(self, rows: Iterable[TokenProgram]) -> bool:
        """Whether :meth:`acquire` of these rows would succeed now."""
        return self.lacking(rows) is None

    def lacking(self, rows: Iterable[TokenProgram]) -> str | None:
        """Of what there is too little for these rows now: ``rows``, ``instructions`` or ``vectors``; None if they
        fit."""
        missing = [row for row in rows if row.digest not in self._rows]
        if not missing:
            return None
        vectors = {vector for row in missing for vector in row.vectors if vector not in self._vectors}
        if len(missing) > len(self._free_rows):
            return "rows"
        if sum(row.instruction_count for row in missing) > len(self._free_instructions):
            return "instructions"
        return "vectors" if len(vectors) > len(self._free_vectors) else None

    def acquire(self, rows: Iterable[TokenProgram]) -> tuple[list[PlacedRow], dict[bytes, int]]:
        """Take one reference on each row. Returns what is new: rows with their places, and vectors' places by digest.

        Raises ``MemoryError`` where they do not fit; call :meth:`fits` first.
        """
        rows = list(rows)
        if not self.fits(rows):
            raise MemoryError("the steering tables are full; admission should have held this request back")
        new_rows: list[PlacedRow] = []
        new_vectors: dict[bytes, int] = {}
        for row in rows:
            held = self._rows.get(row.digest)
            if held is not None:
                held.users += 1
                continue
            for vector in row.vectors:
                known = self._vectors.get(vector)
                if known is None:
                    known = self._vectors[vector] = _Held(self._free_vectors.pop(), 0)
                    new_vectors[vector] = known.place
                known.users += 1
            place = self._free_rows.pop()
            taken = [self._free_instructions.pop() for _ in range(row.instruction_count)]
            self._rows[row.digest] = _Held(place, 1)
            self._instructions_of[row.digest] = taken
            new_rows.append(PlacedRow(row, place, taken))
        return new_rows, new_vectors

    def release(self, rows: Iterable[TokenProgram]) -> None:
        """Give back one reference on each row; the last one frees its places."""
        for row in rows:
            held = self._rows[row.digest]
            held.users -= 1
            if held.users:
                continue
            del self._rows[row.digest]
            self._free_rows.append(held.place)
            self._free_instructions.extend(self._instructions_of.pop(row.digest))
            for vector in row.vectors:
                known = self._vectors[vector]
                known.users -= 1
                if not known.users:
                    del self._vectors[vector]
                    self._free_vectors.append(known.place)

    def holds(self, row: TokenProgram) -> bool:
        return row.digest in self._rows

    def row_place(self, row: TokenProgram | None) -> int:
        return 0 if row is None else self._rows[row.digest].place

    def vector_place(self, digest: bytes) -> int:
        return self._vectors[digest].place

    @property
    def in_use(self) -> tuple[int, int, int]:
        """Rows, instructions and vectors in use."""
        return (
            len(self._rows),
            self._max_instructions - len(self._free_instructions),
            len(self._vectors),
        )

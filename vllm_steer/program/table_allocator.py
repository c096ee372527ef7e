# SPDX-License-Identifier: Apache-2.0
"""Allocation of table rows, instructions and vectors to token programs.

The scheduler has one allocator to decide admission, and each worker one to place the admitted programs. Nothing has to
be contiguous (instructions are linked lists), so counts alone decide whether a program fits, and the allocators of
scheduler and workers cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_steer.limits import ENGINE_LIMITS
from vllm_steer.program.token_program import TokenProgram


@dataclass
class _Entry:
    index: int
    users: int


@dataclass
class PlacedTokenProgram:
    """A token program that is new on the device, with its table row and the indices of its instructions."""

    program: TokenProgram
    row: int
    instruction_indices: list[int]


class TableAllocator:
    """Reference counts and free entries of the device tables. Row 0 and instruction 0 are reserved for "nothing"."""

    def __init__(
        self,
        max_rows: int,
        max_instructions: int,
        max_vectors: int,
        max_matrix_rows: int = ENGINE_LIMITS["max_matrix_rows"].default,
    ) -> None:
        self._max_instructions = max_instructions
        self._free_rows = list(range(max_rows, 0, -1))
        self._free_instructions = list(range(max_instructions, 0, -1))
        self._free_vectors = list(range(max_vectors - 1, -1, -1))
        self._free_matrix_rows = self._max_matrix_rows = max_matrix_rows
        self._rows: dict[bytes, _Entry] = {}
        self._vectors: dict[bytes, _Entry] = {}
        self._instructions_of: dict[bytes, list[int]] = {}

    def fits(self, programs: Iterable[TokenProgram]) -> bool:
        """Return whether :meth:`acquire` would succeed now."""
        return self.shortage(programs) is None

    def shortage(self, programs: Iterable[TokenProgram]) -> str | None:
        """Return the table that is too full: ``rows``, ``instructions``, ``vectors``, ``matrix_rows``; None if none."""
        missing = [program for program in programs if program.digest not in self._rows]
        if not missing:
            return None
        vectors = {vector for program in missing for vector in program.vectors if vector not in self._vectors}
        if len(missing) > len(self._free_rows):
            return "rows"
        if sum(program.num_instructions for program in missing) > len(self._free_instructions):
            return "instructions"
        if sum(program.num_matrix_rows for program in missing) > self._free_matrix_rows:
            return "matrix_rows"
        return "vectors" if len(vectors) > len(self._free_vectors) else None

    def acquire(self, programs: Iterable[TokenProgram]) -> tuple[list[PlacedTokenProgram], dict[bytes, int]]:
        """Take one reference on each program.

        Returns:
            The programs that are new on the device, and the indices of new vectors by digest.

        Raises:
            MemoryError: the programs do not fit; call :meth:`fits` first.
        """
        programs = list(programs)
        if not self.fits(programs):
            raise MemoryError("the steering tables are full; admission must not let this request run")
        placed: list[PlacedTokenProgram] = []
        new_vectors: dict[bytes, int] = {}
        for program in programs:
            row = self._rows.get(program.digest)
            if row is not None:
                row.users += 1
                continue
            for digest in program.vectors:
                vector = self._vectors.get(digest)
                if vector is None:
                    vector = self._vectors[digest] = _Entry(self._free_vectors.pop(), 0)
                    new_vectors[digest] = vector.index
                vector.users += 1
            row = self._rows[program.digest] = _Entry(self._free_rows.pop(), 1)
            indices = [self._free_instructions.pop() for _ in range(program.num_instructions)]
            self._instructions_of[program.digest] = indices
            self._free_matrix_rows -= program.num_matrix_rows
            placed.append(PlacedTokenProgram(program, row.index, indices))
        return placed, new_vectors

    def release(self, programs: Iterable[TokenProgram]) -> None:
        """Drop one reference on each program; the last one frees its entries."""
        for program in programs:
            row = self._rows[program.digest]
            row.users -= 1
            if row.users:
                continue
            del self._rows[program.digest]
            self._free_matrix_rows += program.num_matrix_rows
            self._free_rows.append(row.index)
            self._free_instructions.extend(self._instructions_of.pop(program.digest))
            for digest in program.vectors:
                vector = self._vectors[digest]
                vector.users -= 1
                if not vector.users:
                    del self._vectors[digest]
                    self._free_vectors.append(vector.index)

    def holds(self, program: TokenProgram) -> bool:
        """Return whether the program is on the device."""
        return program.digest in self._rows

    def row_of(self, program: TokenProgram | None) -> int:
        """Return the table row of a program; 0 for None."""
        return 0 if program is None else self._rows[program.digest].index

    def vector_indices(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """Return the index of each vector by its digest."""
        return {digest: self._vectors[digest].index for digest in digests}

    def vector_index(self, digest: bytes) -> int:
        """Return the index of a vector."""
        return self._vectors[digest].index

    @property
    def in_use(self) -> tuple[int, int, int, int]:
        """Number of rows, instructions, vectors and matrix rows in use."""
        instructions = self._max_instructions - len(self._free_instructions)
        return len(self._rows), instructions, len(self._vectors), self._max_matrix_rows - self._free_matrix_rows

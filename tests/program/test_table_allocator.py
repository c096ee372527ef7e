# SPDX-License-Identifier: Apache-2.0
"""The books against the plainest model of them: the set of what running requests hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_steer.program import Resolved, TableAllocator, compile_program, resolve
from vllm_steer.request import Edit

ROWS, INSTRUCTIONS, VECTORS, MATRIX_ROWS = 5, 12, 7, 7


def request(seeds: list[int], layers: int) -> Resolved:
    vectors = [np.random.default_rng(seed).standard_normal(4) for seed in seeds]
    edits = [
        Edit(kind="add", point="post_block", layers=list(range(layers)), vector=v, tokens=["all", "generated"][i % 2])
        for i, v in enumerate(vectors)
    ]
    if seeds[0] % 2:
        matrix = np.stack([v + row for v in vectors[:1] for row in range(2)])
        edits.append(Edit(kind="replace", point="post_block", layers=0, vector=matrix, tokens=[1, 3]))
    return resolve(compile_program(edits), 5, 8)


class Books(RuleBasedStateMachine):
    """Admit, finish; the ledger must say "fits" exactly when the union of contents fits."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = TableAllocator(ROWS, INSTRUCTIONS, VECTORS, MATRIX_ROWS)
        self.running: list[Resolved] = []

    def content(self, extra: Resolved | None = None) -> tuple[int, int, int, int]:
        rows = {row.digest: row for r in [*self.running, *([extra] if extra else [])] for row in r.token_programs}
        vectors = {vector for row in rows.values() for vector in row.vectors}
        instructions = sum(row.num_instructions for row in rows.values())
        return len(rows), instructions, len(vectors), sum(row.num_matrix_rows for row in rows.values())

    @rule(seeds=st.lists(st.integers(0, 7), min_size=1, max_size=3), layers=st.integers(1, 3))
    def admit(self, seeds: list[int], layers: int) -> None:
        wanted = request(seeds, layers)
        limits = (ROWS, INSTRUCTIONS, VECTORS, MATRIX_ROWS)
        fits = all(count <= limit for count, limit in zip(self.content(wanted), limits, strict=True))
        assert self.ledger.fits(wanted.token_programs) is fits
        if fits:
            self.ledger.acquire(wanted.token_programs)
            self.running.append(wanted)
        else:
            before = self.ledger.in_use
            with pytest.raises(MemoryError):
                self.ledger.acquire(wanted.token_programs)
            assert self.ledger.in_use == before

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        done = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.ledger.release(done.token_programs)

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.ledger.in_use == self.content()

    @invariant()
    def places_are_distinct_and_never_zero(self) -> None:
        rows = {row.digest: row for r in self.running for row in r.token_programs}
        places = [self.ledger.row_of(row) for row in rows.values()]
        assert len(set(places)) == len(places)
        assert 0 not in places


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase


def test_released_slots_are_reused() -> None:
    """Catches a leak: the same small pool must serve any number of requests one after another."""
    ledger = TableAllocator(3, 5, 3, 3)
    for seed in range(50):
        wanted = request([seed], 1)
        ledger.acquire(wanted.token_programs)
        ledger.release(wanted.token_programs)
    assert ledger.in_use == (0, 0, 0, 0)

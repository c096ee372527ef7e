# SPDX-License-Identifier: Apache-2.0
"""Random tables with linked instructions, to compare the tap kernel with its definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.program import instructions as ops
from vllm_steer.program.position_runs import NO_OPERAND
from vllm_steer.taps.assignment import assign_arena_offsets
from vllm_steer.taps.reference import apply_tap
from vllm_steer.taps.tables import Tables

NUM_SITES = 4
# Too small for some seeds: rows that do not fit must be dropped, not written elsewhere.
ARENA_ROWS = 60
POISON = -7.75
NUM_OPERANDS, RUN = 40, 12
"""Operands that are vectors, as many that are numbers, and the largest offset of a token plus 1."""
EDITS = (*ops.CODES.values(), ops.REPLACE_AT, ops.SET_AT)


def random_tables(
    seed: int, hidden: int, device: torch.device, tokens: int = 24, rows: int = 6, dtype: torch.dtype = torch.float32
) -> Tables:
    """Return tables whose rows have up to 4 random edits per site, and captures. Half of the tokens have a row."""
    rng = np.random.default_rng(seed)
    config = SteeringConfig(
        max_rows=rows, max_vectors=8, max_instructions=rows * NUM_SITES * 10, max_segments=2, capture_rows=ARENA_ROWS,
        max_matrix_rows=2 * NUM_OPERANDS,
    )  # fmt: skip
    tables = Tables(
        config, num_sites=NUM_SITES, hidden_size=hidden, max_tokens=tokens, max_requests=2, dtype=dtype, device=device
    )
    vectors = rng.standard_normal((8, hidden)).astype("f4")
    tables.vector.copy_(torch.from_numpy(vectors / np.linalg.norm(vectors, axis=1, keepdims=True)))
    places = list(rng.permutation(np.arange(1, config.max_instructions + 1)))
    for row in range(1, rows + 1):
        captures = 0
        for site in range(NUM_SITES):
            codes = rng.choice(EDITS, rng.integers(0, 5)).tolist()
            codes = [each for code in codes for each in ([ops.MEASURE] * (code == ops.FEATURE) + [code])]
            codes[:0] = [ops.CAPTURE] * int(rng.integers(2))
            codes += [ops.CAPTURE] * int(rng.integers(2))
            chain = [int(places.pop()) for _ in codes]
            for place, code, following in zip(chain, codes, [*chain, 0][1:], strict=True):
                which = captures if code == ops.CAPTURE else int(rng.integers(8))
                captures += code == ops.CAPTURE
                record = torch.tensor([code, which, following, 0], dtype=torch.int32)
                tables.instruction[place] = record.to(device)
                low, high = sorted(rng.standard_normal(2))
                bounded = code in (ops.FEATURE, ops.MEASURE)
                low, high = (
                    (low, high)
                    if bounded
                    else [(low, high), (-ops.UNBOUNDED, high), (low, ops.UNBOUNDED)][rng.integers(3)]
                )
                first = float(rng.integers(NUM_OPERANDS - RUN)) if code in (ops.REPLACE_AT, ops.SET_AT) else 0.0
                if code == ops.SET_AT:
                    first += NUM_OPERANDS
                strength = rng.standard_normal() if rng.integers(2) else 1.0
                tables.parameter[place] = torch.tensor([strength, low, high, first]).to(device)
            if chain:
                tables.head_column(site)[row] = chain[0]
                tables.head_column(site)[0] += 1
        tables.row_captures[row] = captures
    # Vectors, then numbers; a third of the positions are not covered.
    operands = np.concatenate(
        [rng.integers(0, 8, NUM_OPERANDS), rng.standard_normal(NUM_OPERANDS).astype("f4").view("i4")]
    )
    operands[rng.random(2 * NUM_OPERANDS) < 0.3] = NO_OPERAND
    tables.operand.copy_(torch.from_numpy(operands.astype("i4")))
    tables.token_offset.copy_(torch.from_numpy(rng.integers(0, RUN, tokens).astype("i4")))
    token_row = rng.integers(1, rows + 1, tokens) * rng.integers(0, 2, tokens)
    tables.token_row.copy_(torch.from_numpy(token_row.astype("i4")))
    assign_arena_offsets(tables, tokens)
    return tables


def compare(
    launch: object, seed: int, hidden: int, dtype: torch.dtype, with_other: bool, device: torch.device
) -> float:
    """Return the largest difference between ``launch`` and the definition over all sites, in roundings of ``dtype``.

    Raises AssertionError if a token without instructions changed.
    """
    tables = random_tables(seed, hidden, device, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for site in range(NUM_SITES):
        target = torch.randn(24, hidden, generator=generator).to(dtype).to(device)
        other = torch.randn(24, hidden, generator=generator).to(dtype).to(device) if with_other else None
        expected, got = _copies(target, other), _copies(target, other)
        tables.arena.fill_(POISON)
        apply_tap(*expected, tables.head_column(site), tables)
        stored = tables.arena.clone()
        tables.arena.fill_(POISON)
        launch(*got, tables.head_column(site), tables)  # type: ignore[operator]
        if not torch.equal(stored == POISON, tables.arena == POISON):
            raise AssertionError("other rows of the arena were written")
        idle = _first_instruction(tables, site) == 0
        for summand, given in zip(got, (target, other), strict=True):
            if summand is not None and not torch.equal(summand[idle], given[idle]):  # type: ignore[index]
                raise AssertionError("a token without instructions was changed")
        for right, seen in ((stored, tables.arena), (_stream(*expected), _stream(*got))):
            scale = torch.finfo(dtype).eps * right.float().abs().clamp(min=1.0)
            worst = max(worst, float(((right.float() - seen.float()).abs() / scale).max()))
    return worst


def _copies(target: torch.Tensor, other: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return target.clone(), None if other is None else other.clone()


def _stream(target: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    return target.float() if other is None else target.float() + other.float()


def _first_instruction(tables: Tables, site: int) -> torch.Tensor:
    """Return each token's first instruction at a site."""
    return torch.where(tables.token_row != 0, tables.head_column(site)[tables.token_row.long()], 0)


def compare_fused(
    launch: Callable[..., None], seed: int, hidden: int, dtype: torch.dtype, with_other: bool, device: torch.device
) -> str:
    """Return how one launch for two sites differs from two launches, empty if they are bitwise equal."""
    tables = random_tables(seed, hidden, device, dtype=dtype)
    # The last site is unused; its column holds stale values from freed rows.
    tables.head_column(NUM_SITES - 1)[0] = 0
    generator = torch.Generator().manual_seed(seed)
    for site in range(NUM_SITES):
        head, second = tables.head_column(site), tables.head_column((site + 1) % NUM_SITES)
        target = torch.randn(24, hidden, generator=generator).to(dtype).to(device)
        other = torch.randn(24, hidden, generator=generator).to(dtype).to(device) if with_other else None
        apart, joined = _copies(target, other), _copies(target, other)
        tables.arena.fill_(POISON)
        launch(*apart, head, tables)
        launch(*apart, second, tables)
        stored = tables.arena.clone()
        tables.arena.fill_(POISON)
        launch(*joined, head, tables, second)
        for summand, right in zip(joined, apart, strict=True):
            if summand is not None and not torch.equal(summand, right):  # type: ignore[arg-type]
                return f"site {site}: the stream"
        if not torch.equal(stored, tables.arena):
            return f"site {site}: captured rows"
    return ""

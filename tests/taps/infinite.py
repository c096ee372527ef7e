# SPDX-License-Identifier: Apache-2.0
"""Tokens with an infinite or NaN component, read or not covered by an edit, for the definition and the kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.program import instructions as ops
from vllm_steer.program.position_runs import NO_OPERAND
from vllm_steer.taps.tables import Tables

ROWS = ((ops.CAPTURE, 0, 0, 0), (ops.READ, 1, 0, 1), (ops.SET_AT, 1, 0, 0), (ops.REPLACE_AT, 1, 0, 0),
        (ops.READ, 1, 0, 2), (ops.ADD, 1, 0, 0))  # fmt: skip
"""Instruction of each token: code, vector, successor and column. No operand covers the third and fourth."""
COSINE = 4
"""The token whose product is divided by the norms."""
WRITTEN = len(ROWS) - 1
"""The only token that an edit changes."""


def wrong_rows(launch: Callable[..., None], with_other: bool, device: torch.device) -> str:
    """Return what differs from the expected stream, arena and records after one launch, empty if nothing does.

    The difference of two infinite values is NaN, so a token that no edit changes must not be written.
    """
    config = SteeringConfig(max_rows=8, max_vectors=4, max_instructions=8, capture_rows=8)
    tables = Tables(
        config, num_sites=1, hidden_size=4, max_tokens=8, max_requests=2, dtype=torch.float32, device=device
    )
    tables.num_recorded = 1
    tables.vector[1, 1] = 1.0
    tables.operand.fill_(NO_OPERAND)
    for row, instruction in enumerate(ROWS, start=1):
        tables.instruction[row] = torch.tensor(instruction)
        tables.parameter[row, 0] = 2.0
        tables.head_column(0)[row] = row
        tables.token_row[row - 1] = row
    tables.parameter[1 + COSINE, 1] = 2.0
    tables.head_column(0)[0] = len(ROWS)
    before = torch.tensor([[torch.inf, 1.0, 2.0, 3.0]], device=device).repeat(len(ROWS), 1)
    before[COSINE, 0] = torch.nan
    target = before.clone()
    launch(target, torch.zeros_like(target) if with_other else None, tables.head_column(0), tables)
    problems = [f"token {i} was written" for i in range(WRITTEN) if not _equal(target[i], before[i])]
    if target[WRITTEN, 1:].tolist() != [3.0, 2.0, 3.0]:
        problems.append(f"the edited token is {target[WRITTEN].tolist()}")
    if tables.arena[int(tables.token_base[0]), 0] != torch.inf:
        problems.append("the captured row is not infinite")
    if not tables.record[1, 1].isnan():
        problems.append("the record of a product of 0 and infinity is a number")
    if not tables.record[COSINE, 2].isnan():
        problems.append("the cosine of a row with a NaN is a number")
    return "; ".join(problems)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)

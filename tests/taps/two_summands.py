# SPDX-License-Identifier: Apache-2.0
"""Streams in 16 bits with one large summand: what is written, stored and recorded is what the model goes on with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.program import instructions as ops
from vllm_steer.taps.tables import Tables

HIDDEN = 64
CHAINS: tuple[tuple[tuple[int, float, float, float], ...], ...] = (
    ((ops.REPLACE, 1.0, 0.0, 0.0),),
    ((ops.CLAMP, 1.0, 5.0, 5.0),),
    ((ops.ADD, 0.5, 0.0, 0.0), (ops.CLAMP, 1.0, 5.0, 5.0)),
    (),
    ((ops.ADD, 0.0, 0.0, 0.0),),
    ((ops.CLAMP, 1.0, -1e4, 1e4),),
    ((ops.REPLACE, 0.0, 0.0, 0.0),),
)
"""Edits of each token: code, strength and bounds. A capture and a readout follow."""
EDITED = 3
"""Number of tokens at the front that the edits change."""
READ_COLUMN = 1


def wrong_rows(launch: Callable[..., None], dtype: torch.dtype, device: torch.device) -> str:
    """Return what differs from the stream with which the model goes on after one launch, empty if nothing does."""
    tokens = len(CHAINS)
    config = SteeringConfig(max_rows=tokens, max_vectors=4, max_instructions=32, capture_rows=tokens)
    tables = Tables(
        config, num_sites=1, hidden_size=HIDDEN, max_tokens=tokens, max_requests=2, dtype=dtype, device=device
    )
    generator = torch.Generator().manual_seed(7)
    vector = torch.randn(HIDDEN, generator=generator)
    vector = (vector / vector.norm()).to(dtype).float().to(device)
    tables.num_recorded = 1
    tables.vector[1] = vector
    place = 1
    for row, chain in enumerate(CHAINS, start=1):
        tables.head_column(0)[row] = place
        tables.token_row[row - 1] = row
        tables.token_base[row - 1] = row - 1
        for code, *numbers in (*chain, (ops.CAPTURE, 0.0, 0.0, 0.0), (ops.READ, 0.0, 0.0, 0.0)):
            # A capture's operand is its number in the token's rows; the readout is the last instruction.
            fields = (code, int(code != ops.CAPTURE), 0 if code == ops.READ else place + 1, READ_COLUMN)
            tables.instruction[place] = torch.tensor(fields if code == ops.READ else (*fields[:3], 0))
            tables.parameter[place, :3] = torch.tensor(numbers)
            place += 1
    tables.head_column(0)[0] = tokens
    target = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).to(device)
    # Like the few components of a model's first token that are a thousand times the others.
    other = (1000.0 * torch.randn(tokens, HIDDEN, generator=generator)).to(dtype).to(device)
    given = target.clone(), other.clone()
    launch(target, other, tables.head_column(0), tables)
    stream = (target.float() + other.float()).to(dtype)
    problems = []
    if not torch.equal(stream[0], vector.to(dtype)):
        problems.append(f"{int((stream[0] != vector.to(dtype)).sum())} elements of the replaced row differ")
    if not torch.equal(tables.arena[:tokens], stream):
        problems.append("the captured rows differ from the stream")
    off = (tables.record[:tokens, READ_COLUMN] - stream.float() @ vector).abs()
    problems += [f"the readout of token {t} is off by {float(off[t]):.4f}" for t in range(tokens) if off[t] > 1e-3]
    unchanged = slice(EDITED, tokens)
    if not (torch.equal(target[unchanged], given[0][unchanged]) and torch.equal(other[unchanged], given[1][unchanged])):
        problems.append("a token that no edit changes was written")
    return "; ".join(problems)

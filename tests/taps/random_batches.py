# SPDX-License-Identifier: Apache-2.0
"""Random segment tables and batches, to compare the assignment kernels with their definitions."""

from __future__ import annotations

import numpy as np
import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.taps.assignment import BatchLayout, assign_arena_offsets, assign_rows
from vllm_steer.taps.assignment_kernel import launch_arena_offsets, launch_rows
from vllm_steer.taps.tables import OPEN_END, Tables

SLOTS, ROWS, POISON = 70, 9, 77


def compare_rows(seed: int, device: torch.device, max_requests: int = 60, max_tokens: int = 40) -> str:
    """Return how the kernels differ from the definitions on one random batch, empty if they agree."""
    rng = np.random.default_rng(seed)
    config = SteeringConfig(max_rows=ROWS, max_vectors=1, max_instructions=1, max_segments=int(rng.integers(1, 7)))
    counts = rng.integers(1, max_tokens, int(rng.integers(1, max_requests)))
    tokens, padded = int(counts.sum()), int(counts.sum() + rng.integers(0, 50))
    tables = Tables(
        config, num_sites=3, hidden_size=8, max_tokens=padded + 9, max_requests=SLOTS, dtype=torch.float32,
        device=device
    )  # fmt: skip
    starts = np.sort(rng.choice(200, (SLOTS, config.max_segments)), axis=1)
    starts[:, 0] = 0
    starts[starts > 150] = OPEN_END
    tables.segment_start.copy_(torch.from_numpy(starts.astype("i4")))
    tables.segment_row.copy_(torch.from_numpy(rng.integers(0, ROWS + 1, starts.shape).astype("i4")))
    tables.row_captures[1:].copy_(torch.from_numpy(rng.integers(0, 4, ROWS).astype("i4")))
    layout = BatchLayout(
        request_slot=torch.from_numpy(rng.permutation(SLOTS)[: len(counts)]).to(device),
        start=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype("i4")).to(device),
        position=torch.from_numpy(np.concatenate([rng.integers(0, 180) + np.arange(n) for n in counts])).to(device),
        token=torch.zeros(sum(counts), dtype=torch.int32, device=device),
    )
    found = []
    for rows, places in ((assign_rows, assign_arena_offsets), (launch_rows, launch_arena_offsets)):
        tables.token_row.fill_(POISON)
        tables.token_base.fill_(POISON)
        tables.token_offset.fill_(POISON)
        rows(tables, layout, padded)
        places(tables, tokens)
        found.append((tables.token_row.clone(), tables.token_base.clone(), tables.token_offset.clone()))
    names = ("rows", "places", "offsets")
    different = [name for name, a, b in zip(names, *found, strict=True) if not torch.equal(a, b)]
    return f"seed {seed}: {', '.join(different)}" if different else ""

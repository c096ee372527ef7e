# SPDX-License-Identifier: Apache-2.0
"""Random tables with linked instruction sequences, and the comparison of kernel and definition on them."""

from __future__ import annotations

import numpy as np
import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.program import instructions as ops
from vllm_steer.taps.reference import apply_tap
from vllm_steer.taps.tables import Tables

NUM_SITES = 4


def random_tables(seed: int, hidden: int, device: torch.device, tokens: int = 24, rows: int = 6) -> Tables:
    """Each row has 0 to 4 random instructions at each site; half of the tokens take a row."""
    rng = np.random.default_rng(seed)
    config = SteeringConfig(max_rows=rows, max_vectors=8, max_instructions=rows * NUM_SITES * 4, max_segments=2)
    tables = Tables(config, num_sites=NUM_SITES, hidden_size=hidden, max_tokens=tokens, max_requests=2, device=device)
    vectors = rng.standard_normal((8, hidden)).astype("f4")
    tables.vector.copy_(torch.from_numpy(vectors / np.linalg.norm(vectors, axis=1, keepdims=True)))
    places = list(rng.permutation(np.arange(1, config.max_instructions + 1)))
    for row in range(1, rows + 1):
        for site in range(NUM_SITES):
            chain = [int(places.pop()) for _ in range(rng.integers(0, 5))]
            for place, following in zip(chain, (chain + [0])[1:], strict=True):
                code = int(rng.choice([ops.ADD, ops.ADD_NORMED, ops.ABLATE, ops.CLAMP]))
                record = torch.tensor([code, int(rng.integers(8)), following, 0], dtype=torch.int32)
                tables.instruction[place] = record.to(device)
                low, high = sorted(rng.standard_normal(2))
                low, high = [(low, high), (-ops.UNBOUNDED, high), (low, ops.UNBOUNDED)][rng.integers(3)]
                tables.parameter[place] = torch.tensor([rng.standard_normal(), low, high, 0.0]).to(device)
            if chain:
                tables.head[row, site] = chain[0]
    token_row = rng.integers(1, rows + 1, tokens) * rng.integers(0, 2, tokens)
    tables.token_row.copy_(torch.from_numpy(token_row.astype("i4")))
    return tables


def compare(launch: object, seed: int, hidden: int, dtype: torch.dtype, with_other: bool, device: torch.device) -> float:
    """Largest difference between ``launch`` and the definition, over all sites, in units of ``dtype``'s rounding.

    Raises AssertionError where a token without instructions was touched at all.
    """
    tables = random_tables(seed, hidden, device)
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for site in range(NUM_SITES):
        target = torch.randn(24, hidden, generator=generator).to(dtype).to(device)
        other = torch.randn(24, hidden, generator=generator).to(dtype).to(device) if with_other else None
        expected, got = target.clone(), target.clone()
        apply_tap(expected, other, tables.site_head(site), tables)
        launch(got, other, tables.site_head(site), tables)  # type: ignore[operator]
        idle = tables.site_head(site)[tables.token_row.long()] == 0
        if not torch.equal(got[idle], target[idle]):
            raise AssertionError("a token without instructions was changed")
        scale = torch.finfo(dtype).eps * expected.float().abs().clamp(min=1.0)
        worst = max(worst, float(((expected.float() - got.float()).abs() / scale).max()))
    return worst

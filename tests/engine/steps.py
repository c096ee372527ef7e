# SPDX-License-Identifier: Apache-2.0
"""Device tables without an engine, and conversion of a step's rows to chunks per request and back."""

from __future__ import annotations

import numpy as np
import torch

from vllm_steer.capture.row_assembler import RowChunk
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.config import SteeringConfig
from vllm_steer.taps.tables import Tables


def make_tables(
    config: SteeringConfig, num_sites: int = 12, max_tokens: int = 8, max_requests: int = 4, drafts: int = 0
) -> Tables:
    """Return device tables of a model with 8 components, without an engine."""
    return Tables(
        config, num_sites=num_sites, hidden_size=8, max_tokens=max_tokens, max_requests=max_requests,
        dtype=torch.float32, device=torch.device("cpu"), drafts=drafts,
    )  # fmt: skip


def chunks_of(step: StepRows) -> list[RowChunk]:
    """Return one chunk per entry of a step."""
    index = step.index
    return [
        RowChunk(name, int(start), int(count), codes, step.rows_of(i).tobytes())
        for i, (name, codes, start, count) in enumerate(
            zip(index.request_ids, index.codes, step.start, step.count, strict=True)
        )
    ]


def step_of(chunks: list[RowChunk], row_bytes: int) -> StepRows:
    """Return the step with these chunks."""
    return StepRows(
        RowIndex(tuple(c.request_id for c in chunks), tuple(c.captures for c in chunks)),
        np.array([c.start for c in chunks], dtype=np.int64),
        np.array([c.count for c in chunks], dtype=np.int64),
        np.frombuffer(b"".join(c.rows for c in chunks), dtype=np.uint8).reshape(-1, row_bytes),
    )

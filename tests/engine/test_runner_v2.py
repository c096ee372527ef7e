# SPDX-License-Identifier: Apache-2.0
"""What is made of a batch of vLLM's runner V2, which runs on GPUs alone: arrays as it has them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from vllm_steer.engine.runner_v2 import _describe


def test_positions_and_counts_are_what_travels() -> None:
    """Catches int32 counts, which the front end reads as half as many int64 ones. vLLM has room beyond the batch."""
    batch = SimpleNamespace(
        num_reqs=2,
        num_tokens=5,
        num_tokens_after_padding=8,
        req_ids=["a", "b"],
        idx_mapping=torch.tensor([3, 1, 0], dtype=torch.int32),
        idx_mapping_np=np.array([3, 1, 0], dtype=np.int32),
        query_start_loc=torch.tensor([0, 4, 5, 5], dtype=torch.int32),
        positions=torch.arange(8),
        num_computed_tokens_np=np.array([7, 9, 0], dtype=np.int32),
        num_scheduled_tokens=np.array([4, 1], dtype=np.int32),
    )
    step = _describe(batch)
    assert (step.first.dtype, step.count.dtype) == (np.int64, np.int64)
    assert (step.first.tolist(), step.count.tolist(), step.slot.tolist()) == ([7, 9], [4, 1], [3, 1])
    layout = step.layout()
    assert (layout.start.tolist(), len(layout.position), step.num_padded) == ([0, 4, 5], 5, 8)

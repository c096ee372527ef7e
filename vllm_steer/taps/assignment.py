# SPDX-License-Identifier: Apache-2.0
"""Which row each token of a step takes: a pure function of its request and its absolute position, on the device.

Positions come from device state. The host's counters run ahead under async scheduling and speculative decoding, and a
request's prefill length grows after a preemption; position against the segments of the request's *prompt* does neither.

This is the definition, in plain torch; on CUDA one kernel does the same (:mod:`vllm_steer.taps.assignment_kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_steer.taps.tables import Tables


@dataclass(frozen=True)
class BatchLayout:
    """Where a step's tokens come from, all on the tables' device.

    ``slot`` ``[requests]`` int64: each request's place in the segment tables, in batch order. ``start``
    ``[requests + 1]`` int32: its first token in the batch, and the number of tokens last. ``position`` ``[tokens]``
    int64: absolute positions.
    """

    slot: torch.Tensor
    start: torch.Tensor
    position: torch.Tensor


def assign_rows(tables: Tables, layout: BatchLayout, num_padded: int) -> None:
    """Write ``token_row`` for one step; tokens from the batch's last one up to ``num_padded`` take row 0."""
    tokens = layout.position.shape[0]
    index = torch.arange(tokens, dtype=torch.int32, device=tables.device)
    request = torch.searchsorted(layout.start[1:], index, right=True).clamp_(max=layout.slot.shape[0] - 1)
    slot = layout.slot[request].long()
    # Starts ascend and the first is 0, so the number of starts at or before a position names its segment.
    segment = (tables.segment_start[slot] <= layout.position.unsqueeze(1)).sum(1).sub_(1).clamp_(min=0)
    tables.token_row[:tokens] = tables.segment_row[slot].gather(1, segment.unsqueeze(1)).squeeze(1)
    tables.token_row[tokens:num_padded].zero_()


def assign_arena_offsets(tables: Tables, tokens: int) -> None:
    """Write ``token_base`` for one step whose rows are assigned: captured rows lie in the arena in batch order."""
    counts = tables.row_captures[tables.token_row[:tokens].long()].long()
    tables.token_base[:tokens] = counts.cumsum(0) - counts


def clear_rows(tables: Tables, num_padded: int) -> None:
    """Row 0 for every token: padding, dummy and capture steps."""
    tables.token_row[:num_padded].zero_()

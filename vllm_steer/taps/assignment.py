# SPDX-License-Identifier: Apache-2.0
"""Assignment of table rows and arena offsets to the tokens of a step, on the device.

The row of a token depends only on its request and its absolute position. Positions are read on the device because the
host's counters run ahead under async scheduling and speculative decoding, and because a request's prefill length grows
after a preemption.

These functions are the definition. On CUDA, :mod:`vllm_steer.taps.assignment_kernel` replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_steer.taps.tables import Tables


@dataclass(frozen=True)
class BatchLayout:
    """Requests and positions of a step's tokens, on the tables' device.

    Attributes:
        request_slot: ``[requests]`` int64, the row of each request in the segment tables, in batch order.
        start: ``[requests + 1]`` int32, the first token of each request in the batch; the last item is the number of
            tokens.
        position: ``[tokens]`` int64, absolute positions.
        token: ``[tokens]`` int32, token ids.
    """

    request_slot: torch.Tensor
    start: torch.Tensor
    position: torch.Tensor
    token: torch.Tensor


def assign_rows(tables: Tables, layout: BatchLayout, num_padded: int) -> None:
    """Write ``token_row`` and ``token_offset`` for one step; padding tokens, up to ``num_padded``, take row 0."""
    tokens = layout.position.shape[0]
    index = torch.arange(tokens, dtype=torch.int32, device=tables.device)
    request = torch.searchsorted(layout.start[1:], index, right=True).clamp_(max=layout.request_slot.shape[0] - 1)
    slot = layout.request_slot[request].long()
    # Segment starts ascend from 0, so the number of starts up to a position gives its segment.
    segment = (tables.segment_start[slot] <= layout.position.unsqueeze(1)).sum(1).sub_(1).clamp_(min=0)
    tables.token_row[:tokens] = tables.segment_row[slot].gather(1, segment.unsqueeze(1)).squeeze(1)
    tables.token_row[tokens:num_padded].zero_()
    start = tables.segment_start[slot].gather(1, segment.unsqueeze(1)).squeeze(1)
    tables.token_offset[:tokens] = layout.position - start


def assign_arena_offsets(tables: Tables, tokens: int) -> None:
    """Write ``token_base`` for one step with assigned rows. The arena holds captured rows in batch order."""
    counts = tables.row_captures[tables.token_row[:tokens].long()].long()
    tables.token_base[:tokens] = counts.cumsum(0) - counts


def clear_rows(tables: Tables, num_padded: int) -> None:
    """Assign row 0 to the first ``num_padded`` tokens, as for idle and dummy steps."""
    tables.token_row[:num_padded].zero_()

# SPDX-License-Identifier: Apache-2.0
"""Which row each token of a step takes: a pure function of its request and its absolute position, on the device.

Positions come from device state. The host's counters run ahead under async scheduling and speculative decoding, and a
request's prefill length grows after a preemption; position against the segments of the request's *prompt* does neither.
"""

from __future__ import annotations

import torch

from vllm_steer.taps.tables import Tables


def assign_rows(tables: Tables, slot: torch.Tensor, position: torch.Tensor, num_padded: int) -> None:
    """Write ``token_row`` for one step.

    ``slot`` ``[tokens]`` is each token's place in the segment tables, ``position`` ``[tokens]`` its absolute position,
    both on the tables' device; tokens from there up to ``num_padded`` are padding and take row 0.
    """
    tokens = slot.shape[0]
    slot = slot.long()
    # Starts ascend and the first is 0, so the number of starts at or before a position names its segment.
    segment = (tables.segment_start[slot] <= position.unsqueeze(1)).sum(1).sub_(1).clamp_(min=0)
    tables.token_row[:tokens] = tables.segment_row[slot].gather(1, segment.unsqueeze(1)).squeeze(1)
    tables.token_row[tokens:num_padded].zero_()


def assign_places(tables: Tables, tokens: int) -> None:
    """Write ``token_base`` for one step whose rows are assigned: captured rows lie in the arena in batch order."""
    counts = tables.row_captures[tables.token_row[:tokens].long()].long()
    tables.token_base[:tokens] = counts.cumsum(0) - counts


def clear_rows(tables: Tables, num_padded: int) -> None:
    """Row 0 for every token: padding, dummy and capture steps."""
    tables.token_row[:num_padded].zero_()

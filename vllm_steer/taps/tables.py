# SPDX-License-Identifier: Apache-2.0
"""The device tables that every tap reads.

Allocated once, before the model is traced, and only ever written in place: a CUDA graph holds their addresses.

==================  =======================  ==================================================================
table               shape, dtype             meaning
==================  =======================  ==================================================================
``token_row``       [tokens] int32           row of each token of the running step; 0 means no edit
``head``            [rows + 1, sites] int32  first instruction of a row at a site, 0 for none; a column for each site
                                             of this engine, see :attr:`Tables.column`. Row 0, which has no
                                             instructions: how many rows have any at the site
``instruction``     [n + 1, 4] int32         operation code, vector, next instruction (0 ends), unused
``parameter``       [n + 1, 4] float32       strength, low, high, unused
``vector``          [vectors, hidden] f32    the pool of vectors
``segment_start``   [requests, k] int32      first position of each segment of a request, ascending; END pads
``segment_row``     [requests, k] int32      the row of each segment
``row_captures``    [rows + 1] int32         how many rows of the stream each token with this row stores
``token_base``      [tokens] int64           where in the arena a token's captured rows begin
``arena``           [captured, hidden]       the running step's captured rows, token by token, in the model's dtype
==================  =======================  ==================================================================

Vectors are float32 whatever the model's dtype: an instruction computes in float32 and rounds once, when it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.points import columns_of, points_on

OPEN_END = 2**31 - 1


def table_shapes(
    config: SteeringConfig,
    *,
    num_sites: int,
    hidden_size: int,
    max_tokens: int,
    max_requests: int,
    dtype: torch.dtype,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every table of an engine rank."""
    rows, instructions, segments = config.max_rows + 1, config.max_instructions + 1, config.max_segments
    return {
        "token_row": ((max_tokens,), torch.int32),
        "head": ((rows, num_sites), torch.int32),
        "instruction": ((instructions, 4), torch.int32),
        "parameter": ((instructions, 4), torch.float32),
        "vector": ((config.max_vectors, hidden_size), torch.float32),
        "segment_start": ((max_requests, segments), torch.int32),
        "segment_row": ((max_requests, segments), torch.int32),
        "row_captures": ((rows,), torch.int32),
        "token_base": ((max_tokens,), torch.int64),
        "arena": ((config.capture_rows, hidden_size), dtype),
    }


def table_bytes(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, int]:
    """Bytes of each table."""
    return {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}


class Tables:
    """All tables of one engine rank, and the host-side facts that let a step skip them."""

    token_row: torch.Tensor
    head: torch.Tensor
    instruction: torch.Tensor
    parameter: torch.Tensor
    vector: torch.Tensor
    segment_start: torch.Tensor
    segment_row: torch.Tensor
    row_captures: torch.Tensor
    token_base: torch.Tensor
    arena: torch.Tensor

    def __init__(
        self,
        config: SteeringConfig,
        *,
        num_sites: int,
        hidden_size: int,
        max_tokens: int,
        max_requests: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.num_sites = num_sites
        # The points that this engine has, and the column of each site: programs number the sites of all points.
        self.points = points_on(config.points)
        self.column = columns_of(self.points, num_sites // len(self.points))
        shapes = table_shapes(
            config,
            num_sites=num_sites,
            hidden_size=hidden_size,
            max_tokens=max_tokens,
            max_requests=max_requests,
            dtype=dtype,
        )
        for name, (shape, of) in shapes.items():
            setattr(self, name, torch.zeros(shape, dtype=of, device=device))
        self.segment_start.fill_(OPEN_END)
        # How many placed rows have an instruction at each site.
        self.site_users = [0] * num_sites
        # Which sites' taps launch, by number. A captured graph replays what was launched when it was captured; wherever
        # Python runs, this follows the step.
        self.no_sites = (False,) * num_sites
        self.active_sites: Sequence[object] = self.no_sites

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables together."""
        return sum(table.nbytes for _, table in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tables by name."""
        return ((name, value) for name, value in vars(self).items() if isinstance(value, torch.Tensor))

    def site_head(self, site: int) -> torch.Tensor:
        """``head`` of one column ``[rows + 1]``: a view, whose storage offset is the column's number."""
        return self.head[:, site]

    def saved(self) -> dict[str, torch.Tensor]:
        """A copy of all tables in host memory, by name; without the arena, whose rows belong to a step."""
        return {
            name: value.to("cpu", copy=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor) and value is not self.arena
        }

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Write back, in place, what :meth:`saved` returned."""
        for name, value in saved.items():
            getattr(self, name).copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tables:
        """One set of tables per rank: a copied configuration still points to the same ones."""
        return self

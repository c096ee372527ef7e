# SPDX-License-Identifier: Apache-2.0
"""The device tables that every tap reads.

Allocated once, before the model is traced, and only ever written in place: a CUDA graph holds their addresses.

==================  =======================  ==================================================================
table               shape, dtype             meaning
==================  =======================  ==================================================================
``token_row``       [tokens] int32           row of each token of the running step; 0 means no edit
``head``            [rows + 1, sites] int32  first instruction of a row at a site, 0 for none
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

from typing import Any

import torch

from vllm_steer.config import SteeringConfig

END = 2**31 - 1


class Tables:
    """All tables of one engine rank, and the two host-side facts that let a step skip them."""

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
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.num_sites = num_sites
        self.token_row = zeros(max_tokens)
        self.head = zeros(config.max_rows + 1, num_sites)
        self.instruction = zeros(config.max_instructions + 1, 4)
        self.parameter = zeros(config.max_instructions + 1, 4, dtype=torch.float32)
        self.vector = zeros(config.max_vectors, hidden_size, dtype=torch.float32)
        self.segment_start = torch.full((max_requests, config.max_segments), END, dtype=torch.int32, device=device)
        self.segment_row = zeros(max_requests, config.max_segments)
        self.row_captures = zeros(config.max_rows + 1)
        self.token_base = zeros(max_tokens, dtype=torch.int64)
        self.arena = zeros(config.capture_rows, hidden_size, dtype=dtype)
        # Whether the taps launch at all. A captured graph replays what was launched at capture, so on a device with
        # graphs this stays on once capture begins; elsewhere it follows the step.
        self.launch = False
        # How many placed rows have an instruction at a site: a site without any is skipped where no graph is captured.
        self.site_users = [0] * num_sites

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables together."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))

    def site_head(self, site: int) -> torch.Tensor:
        """``head`` of one site ``[rows + 1]``: a view, whose storage offset is the site's number."""
        return self.head[:, site]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tables:
        """One set of tables per rank: a copied configuration still points to the same ones."""
        return self

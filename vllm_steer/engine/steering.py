# SPDX-License-Identifier: Apache-2.0
"""One engine rank's steering: taps on the model, tables, programs, and what to do before each forward pass.

The runners differ in how they keep a batch; both reduce it to :class:`StepBatch`. Nothing beyond the two runner files
knows which one it is in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from vllm_steer.config import from_vllm_config
from vllm_steer.engine.collect import PendingRows, Planned, snapshot
from vllm_steer.engine.store import ProgramStore
from vllm_steer.errors import SteeringError
from vllm_steer.models.discovery import find_decoder
from vllm_steer.models.install import install_taps
from vllm_steer.points import POINT_NAMES
from vllm_steer.taps.rows import assign_places, assign_rows, clear_rows
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import CONTEXT_KEY

logger = init_logger(__name__)


@dataclass(frozen=True)
class StepBatch:
    """What a runner says about one real step, all on the device.

    ``slot`` ``[tokens]``: each token's request's place in the segment tables. ``position`` ``[tokens]``: its absolute
    position. ``num_padded``: how many tokens the model runs on. ``requests``: id, first position and number of tokens
    of each request in batch order, as the host knows them (positions may be ahead of the device's); looked at only
    while some request captures.
    """

    slot: torch.Tensor
    position: torch.Tensor
    num_padded: int
    requests: Sequence[tuple[str, int, int]] = ()


class Steering:
    """Owned by the model runner, made after loading and before the first forward pass."""

    def __init__(
        self, model: nn.Module, vllm_config: Any, device: torch.device, *, max_tokens: int, max_requests: int
    ) -> None:
        started = time.perf_counter()
        config = from_vllm_config(vllm_config)
        if config is None:
            raise SteeringError("additional_config", "has no steering section, though the steering worker is in use")
        model_config = vllm_config.model_config
        decoder = find_decoder(model, model_config.hf_text_config)
        self.decoder = decoder
        self.tables = Tables(
            config,
            num_sites=decoder.num_layers * len(POINT_NAMES),
            hidden_size=model_config.get_hidden_size(),
            max_tokens=max_tokens,
            max_requests=max_requests,
            dtype=model_config.dtype,
            device=device,
        )
        self.store = ProgramStore(self.tables, config, decoder.num_layers)
        install_taps(decoder, self.tables)
        vllm_config.compilation_config.static_forward_context[CONTEXT_KEY] = self.tables
        # A captured graph replays the launches that it saw: with graphs, taps launch in every step and leave by row 0.
        self._always_launch = device.type == "cuda" and not model_config.enforce_eager
        self.tables.launch = self._always_launch
        self._written = 0
        self._drafts = vllm_config.speculative_config is not None
        self._leaves = get_tensor_model_parallel_rank() == 0
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._step: tuple[StepBatch, tuple[Planned, ...], int] | None = None
        self._pending: PendingRows | None = None
        self._model_config = model_config
        logger.info(
            "Steering: %d sites on %d layers of %s, tables %.1f MiB, installed in %.0f ms",
            len(decoder.sites) * len(POINT_NAMES),
            len(decoder.sites),
            type(model).__name__,
            self.tables.num_bytes / 2**20,
            1000 * (time.perf_counter() - started),
        )

    @property
    def active(self) -> bool:
        """Whether any request in the engine is steered: if not, a runner need not describe its batch."""
        return self.store.num_steered > 0

    def begin_step(self, batch: StepBatch) -> None:
        """Before the forward pass of a real step while :attr:`active`."""
        if self._written > batch.num_padded:
            clear_rows(self.tables, self._written)
        assign_rows(self.tables, batch.slot, batch.position, batch.num_padded)
        self._written = batch.num_padded
        self.tables.launch = True
        if self.store.num_capturing:
            assign_places(self.tables, batch.slot.shape[0])
            planned, num_rows = self._plan(batch)
            self._step = (batch, planned, num_rows) if num_rows and self._leaves else None

    def _plan(self, batch: StepBatch) -> tuple[tuple[Planned, ...], int]:
        """The capturing requests of a step, and how many rows it stores (at most, where drafts may be rejected)."""
        planned = []
        num_rows = token = 0
        for request_id, first, count in batch.requests:
            resolved = self.store.resolved_of(request_id)
            if resolved is not None and resolved.max_captures:
                planned.append(Planned(request_id, resolved, token, count))
                num_rows += (
                    count * resolved.max_captures if self._drafts else resolved.captured_rows(first, first + count)
                )
            token += count
        return tuple(planned), min(num_rows, self.tables.arena.shape[0])

    def end_step(self) -> None:
        """After the forward pass, on the same stream: what was captured must leave before the next step stores over
        it."""
        if self._step is None:
            return
        batch, planned, num_rows = self._step
        self._step = None
        self._pending = snapshot(self.tables, batch.position, planned, num_rows, self._side_stream)

    def take_rows(self) -> PendingRows | None:
        """The last step's captured rows, once."""
        pending, self._pending = self._pending, None
        return pending

    def begin_idle_step(self) -> None:
        """Before any other forward pass: real steps without steered requests, dummy, profiling and capture runs."""
        if self._written:
            clear_rows(self.tables, self._written)
            self._written = 0
        self.tables.launch = self._always_launch

    def capabilities(self) -> dict[str, Any]:
        """What this rank serves, in builtins only: it travels to the front end as an RPC result."""
        refused: dict[str, dict[str, str]] = {}
        for site in self.decoder.sites:
            if site.recipe.mid is None:
                reason = site.recipe.no_mid.format(layer=type(site.layer).__name__)
                refused.setdefault("post_attn", {})[str(site.number)] = reason
        return {
            "num_layers": self.decoder.num_layers,
            "hidden_size": self._model_config.get_hidden_size(),
            "max_model_len": self._model_config.max_model_len,
            "refused": refused,
            "dtype": str(self._model_config.dtype).removeprefix("torch."),
        }

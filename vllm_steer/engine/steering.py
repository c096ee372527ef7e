# SPDX-License-Identifier: Apache-2.0
"""One engine rank's steering: taps on the model, tables, programs, and what to do before each forward pass.

The runners differ in how they keep a batch; both reduce it to :class:`StepBatch`. Nothing beyond the two runner files
knows which one it is in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_steer.config import from_vllm_config
from vllm_steer.engine.store import ProgramStore
from vllm_steer.errors import SteeringError
from vllm_steer.models.discovery import find_decoder
from vllm_steer.models.install import install_taps
from vllm_steer.points import POINT_NAMES
from vllm_steer.taps.rows import assign_rows, clear_rows
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import CONTEXT_KEY

logger = init_logger(__name__)


@dataclass(frozen=True)
class StepBatch:
    """What a runner says about one real step, all on the device.

    ``slot`` ``[tokens]``: each token's request's place in the segment tables. ``position`` ``[tokens]``: its absolute
    position. ``num_padded``: how many tokens the model runs on.
    """

    slot: torch.Tensor
    position: torch.Tensor
    num_padded: int


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
            device=device,
        )
        self.store = ProgramStore(self.tables, config, decoder.num_layers)
        install_taps(decoder, self.tables)
        vllm_config.compilation_config.static_forward_context[CONTEXT_KEY] = self.tables
        # A captured graph replays the launches that it saw: with graphs, taps launch in every step and leave by row 0.
        self._always_launch = device.type == "cuda" and not model_config.enforce_eager
        self.tables.launch = self._always_launch
        self._written = 0
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
        }

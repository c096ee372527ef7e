# SPDX-License-Identifier: Apache-2.0
"""One engine rank's steering: taps on the model, tables, programs, and what to do before each forward pass.

The runners differ in how they keep a batch; both reduce it to :class:`StepBatch`. Nothing beyond the two runner files
knows which one it is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from vllm_steer.capture.step_plan import CaptureBatch, CapturePlan, SteadyCaptureBatch
from vllm_steer.config import from_vllm_config
from vllm_steer.engine.device_to_host import DeviceToHostCopier, PendingRows, Products, Transfer
from vllm_steer.engine.graph_sets import GraphSets
from vllm_steer.engine.plain_code import own_forwards, plain_code
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.row_assignment_cache import RowAssignmentCache
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.metrics.worker_stats import WorkerStats
from vllm_steer.models.discovery import find_decoder
from vllm_steer.models.install import install_taps
from vllm_steer.points import POINTS_FLAG, points_on
from vllm_steer.taps.assignment import BatchLayout, assign_places, assign_rows, clear_rows
from vllm_steer.taps.projection import products_at
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import CONTEXT_KEY

logger = steering_logger(__name__)
P = ParamSpec("P")


@dataclass(frozen=True)
class StepBatch:
    """What a runner says about one real step.

    ``layout`` makes the device's word on slots and positions, where it is wanted. The rest is the host's, int arrays by
    request in batch order: ``slot``, ``first`` (its first position in this step, which can be ahead of the device's
    while draft tokens await their verdict) and ``count`` (its tokens in this step). ``num_padded``: how many tokens the
    model runs on.
    """

    layout: Callable[[], BatchLayout]
    ids: Sequence[str]
    slot: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    num_padded: int


@dataclass(frozen=True)
class _Stored:
    """What a step stores: its first ``num_rows`` rows of the arena."""

    plan: CapturePlan | CaptureBatch
    num_rows: int
    position: torch.Tensor | None


def _timed(method: Callable[Concatenate[WorkerSteering, P], None]) -> Callable[Concatenate[WorkerSteering, P], None]:
    """Add what a call takes to the step's seconds."""

    @wraps(method)
    def timed(self: WorkerSteering, /, *args: P.args, **kwargs: P.kwargs) -> None:
        started = time.perf_counter()
        method(self, *args, **kwargs)
        self._seconds += time.perf_counter() - started

    return timed


class WorkerSteering:
    """Owned by the model runner, made after loading and before the first forward pass. ``several_graphs``: an idle step
    may run other code than a busy one there."""

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        device: torch.device,
        *,
        max_tokens: int,
        max_requests: int,
        several_graphs: bool,
    ) -> None:
        started = time.perf_counter()
        config = from_vllm_config(vllm_config)
        if config is None:
            raise SteeringError("additional_config", "has no steering section, though the steering worker is in use")
        model_config = vllm_config.model_config
        decoder = find_decoder(model, model_config.hf_text_config, allow_unproven=config.allow_unproven)
        for doubt in decoder.unproven:
            logger.warning("Steering runs unproven, as --steering-allow-unproven asks: %s.", doubt)
        refused = decoder.refused(get_tensor_model_parallel_world_size() > 1)
        for point in config.points:
            if len(reasons := refused[point]) == len(decoder.layers):
                # Requests at it are refused with the reason, each; the operator is told why that is so.
                logger.warning("%s %s serves nothing here: %s.", POINTS_FLAG, point, next(iter(reasons.values())))
        self.decoder = decoder
        points = points_on(config.points)
        self.tables = Tables(
            config,
            num_sites=decoder.num_layers * len(points),
            hidden_size=model_config.get_hidden_size(),
            max_tokens=max_tokens,
            max_requests=max_requests,
            dtype=model_config.dtype,
            device=device,
        )
        self.store = ProgramStore(self.tables, config, decoder.num_layers, decoder.layer_range)
        before = own_forwards(model)
        install_taps(decoder, self.tables)
        vllm_config.compilation_config.static_forward_context[CONTEXT_KEY] = self.tables
        plain = None
        if config.plain_code and several_graphs:
            plain = plain_code(model, decoder, vllm_config, before)
        elif config.plain_code:
            logger.warning("No plain code: this runner's CUDA graphs are captured once, with every tap.")
        self.graph_sets = GraphSets(self.tables, config.graph_sets, len(points), decoder.layer_range, plain)
        make_products: Products = products_at
        if device.type == "cuda":
            from vllm_steer.taps import assignment_kernel, kernel, projection_kernel

            # Compiled here: once vLLM serves, it warns of each kernel that is, or ends (--jit-monitor-mode error).
            kernel.warm_up(self.tables, model_config.dtype)
            self._rows_of, self._places_of = assignment_kernel.launch_rows, assignment_kernel.launch_places
            assignment_kernel.warm_up(self.tables)
            if projection_kernel.serves(device, model_config.dtype):
                make_products = projection_kernel.launch_products
                projection_kernel.warm_up(self.tables.arena)
        else:
            self._rows_of, self._places_of = assign_rows, assign_places
        self._written = 0
        self._assigned = RowAssignmentCache()
        self._placed = False
        self._drafts = vllm_config.speculative_config is not None
        self._leaves = get_tensor_model_parallel_rank() == 0
        self._departures = DeviceToHostCopier(device, make_products)
        self._step: _Stored | None = None
        self._steady: tuple[int, SteadyCaptureBatch] = (-1, SteadyCaptureBatch((), ()))
        self._pending: PendingRows | None = None
        self._seconds = 0.0
        self._worked = False
        self._model_config = model_config
        self._model_class = type(model).__name__
        self.self_check: dict[str, Any] = {"ran": False, "reason": "the engine is still starting"}
        logger.info(
            "Steering: %d sites on %d layers of %s, tables %.1f MiB, installed in %.0f ms",
            len(decoder.layers) * len(points),
            len(decoder.layers),
            type(model).__name__,
            self.tables.num_bytes / 2**20,
            1000 * (time.perf_counter() - started),
        )

    @property
    def active(self) -> bool:
        """Whether any request in the engine is steered: if not, a runner need not describe its batch."""
        return self.store.num_steered > 0

    @_timed
    def begin_step(self, batch: StepBatch) -> None:
        """Before the forward pass of a real step while :attr:`active`."""
        self._worked = True
        store = self.store
        store.flush()
        # Where drafts are in flight the host's first position may be too high, so its word on an end is not taken.
        first = np.zeros_like(batch.first) if self._drafts else batch.first
        stop = batch.first + batch.count
        settled = not self._drafts and bool((first >= store.last_segment[batch.slot]).all())
        if not self._assigned.serve(store.changes, batch.num_padded, batch.slot, batch.count, settled=settled):
            if not store.active.meets(batch.slot, first, stop).any():
                self.begin_idle_step()
                return
            if self._written > batch.num_padded:
                clear_rows(self.tables, self._written)
            self._assign_rows(batch.layout(), batch.num_padded)
            self._written = batch.num_padded
            self._placed = False
        self.graph_sets.busy(self.tables.site_users, store.version)
        if not store.num_capturing:
            return
        reading = np.flatnonzero(store.reads.meets(batch.slot, first, stop))
        if len(reading):
            if not self._placed:
                self._places_of(self.tables, int(batch.count.sum()))
                self._placed = True
            if self._leaves:
                self._step = self._plan(batch, reading)

    def _assign_rows(self, layout: BatchLayout, num_padded: int) -> None:
        self._rows_of(self.tables, layout, num_padded)

    def _plan(self, batch: StepBatch, reading: npt.NDArray[np.int64]) -> _Stored | None:
        """What the requests at ``reading`` in the batch store in this step."""
        first, count = batch.first[reading], batch.count[reading]
        ids = tuple(batch.ids) if len(reading) == len(batch.ids) else tuple(batch.ids[i] for i in reading.tolist())
        if not self._drafts and (first >= self.store.last_segment[batch.slot[reading]]).all():
            # A steady batch: no position changes segment any more.
            plan = self._steady_batch(ids).plan(first, count)
            return self._leaving(plan, plan.num_rows, None)
        token = (np.cumsum(batch.count) - batch.count)[reading]
        them = CaptureBatch(ids, tuple(self.store.resolved_of(name) for name in ids), token, first, count)
        if self._drafts:
            return self._leaving(them, them.max_rows(), batch.layout().position)
        plan = them.plan_at(first.tolist())
        return self._leaving(plan, plan.num_rows, None)

    def _leaving(
        self, plan: CapturePlan | CaptureBatch, num_rows: int, position: torch.Tensor | None
    ) -> _Stored | None:
        num_rows = min(num_rows, self.tables.arena.shape[0])
        return _Stored(plan, num_rows, position) if num_rows else None

    def _steady_batch(self, ids: tuple[str, ...]) -> SteadyCaptureBatch:
        """Made again only when a request came or went, or the batch is in another order."""
        changes, steady = self._steady
        if changes != self.store.changes or steady.request_ids != ids:
            steady = SteadyCaptureBatch(ids, tuple(self.store.resolved_of(name).segments[-1].row for name in ids))
            self._steady = (self.store.changes, steady)
        return steady

    def end_step(self) -> None:
        """After the forward pass, on the same stream: what was captured starts on its way."""
        self.graph_sets.rest()
        if self._step is not None:
            self._depart(self._step)
            self._step = None

    @_timed
    def _depart(self, step: _Stored) -> None:
        stored = self.tables.arena[: step.num_rows]
        self._pending = self._departures.start(stored, step.position, step.plan, self._forms(step.plan))

    def _forms(self, plan: CapturePlan | CaptureBatch) -> tuple[Transfer, ...]:
        """In what forms a step's rows leave. Where positions are the device's word alone, every form takes them all."""
        wanted: list[tuple[bytes, npt.NDArray[np.int64] | None]]
        if isinstance(plan, CapturePlan):
            wanted = [(stream.index.projection, stream.arena_rows) for stream in plan.streams]
        else:
            wanted = [(projection, None) for projection in plan.projections()]
        return tuple(
            Transfer(projection, rows, self.store.directions(projection) if projection else None)
            for projection, rows in wanted
        )

    @contextmanager
    def taking_rows(self) -> Iterator[None]:
        """This rank's rows go to :meth:`take_rows`, also where another rank's are those that requests get."""
        leaves, self._leaves = self._leaves, True
        try:
            yield
        finally:
            self._leaves = leaves

    def take_rows(self) -> PendingRows | None:
        """The last step's captured rows, once."""
        pending = self._pending
        self._pending = None
        return pending

    def take_note(self) -> WorkerStats | None:
        """What the last step took, once; None where it had nothing to do for us."""
        if not self._worked:
            return None
        seconds, self._seconds = self._seconds, 0.0
        self._worked = False
        return WorkerStats(seconds, self._departures.num_bytes)

    def begin_idle_step(self) -> None:
        """Before any other forward pass: real steps without steered requests, dummy, profiling and capture runs."""
        self.store.flush()
        self._assigned.forget()
        if self._written:
            clear_rows(self.tables, self._written)
            self._written = 0
        self.graph_sets.idle()

    def capabilities(self) -> dict[str, Any]:
        """What this rank serves, in builtins only: it travels to the front end as an RPC result."""
        tensor_parallel = get_tensor_model_parallel_world_size() > 1
        return {
            "num_layers": self.decoder.num_layers,
            "hidden_size": self._model_config.get_hidden_size(),
            "max_model_len": self._model_config.max_model_len,
            "refused": self.decoder.refused(tensor_parallel),
            "unread": self.decoder.unread(tensor_parallel),
            "dtype": str(self._model_config.dtype).removeprefix("torch."),
            "architecture": self._model_config.architectures[0],
            "model_class": self._model_class,
            "recipes": self.decoder.recipes(),
            "unproven": list(self.decoder.unproven),
            "tables": {name: value.nbytes for name, value in self.tables.named_tensors()},
            "self_check": self.self_check,
        }

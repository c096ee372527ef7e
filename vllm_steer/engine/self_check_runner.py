# SPDX-License-Identifier: Apache-2.0
"""Run the self-check's requests in a worker as real steps without a scheduler.

vLLM's dummy runs write no keys and values, so they would leave attention unchecked. vLLM warms up its kernels with
scheduler-less steps too (``v1/worker/gpu/warmup.py``). All ranks run the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_steer.capture.step_rows import StepRows
from vllm_steer.compat.internals import NewRequestData, SamplingParams, SchedulerOutput
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.models.self_check_plan import NEEDED, TOKENS, CheckRequest, Rows, Site, prompt_of
from vllm_steer.params import PROGRAM_KEY
from vllm_steer.points import POINT_NAMES
from vllm_steer.program import compile_program

_MAX_REQUESTS = 32
"""Most requests of one step."""
_REQUEST_PREFIX = "_steering_self_check_"
_ENCODER_INPUT = SimpleNamespace(
    data=None,
    modality="audio",
    identifier=_REQUEST_PREFIX,
    mm_position=SimpleNamespace(offset=0, length=1, get_num_embeds=lambda: 1),
)
"""One position of an encoder, which does not run: without any, cross-attention is undefined on CPUs. vLLM's warm-up
does the same; runners read the length only."""


def can_disable_connector(worker: Any) -> bool:
    """Return whether the runner can run steps without its KV connector."""
    return hasattr(getattr(worker.model_runner, "kv_connector", None), "set_disabled")


def allocate_blocks(worker: Any) -> list[tuple[list[int], ...]]:
    """Return KV block ids by cache group for each request of a step, for as many requests as fit.

    Block 0 is vLLM's null block.
    """
    cache = worker.model_runner.kv_cache_config
    positions = TOKENS + worker.vllm_config.num_lookahead_tokens
    counts = [_count_blocks(group.kv_cache_spec, positions, worker.vllm_config) for group in cache.kv_cache_groups]
    requests: list[tuple[list[int], ...]] = []
    free = 1
    while len(requests) < _MAX_REQUESTS and (not counts or free + sum(counts) <= cache.num_blocks):
        ids = []
        for count in counts:
            ids.append(list(range(free, free + count)))
            free += count
        requests.append(tuple(ids))
    return requests


def _count_blocks(spec: Any, positions: int, vllm_config: Any) -> int:
    """Return the number of blocks of a request in one cache group.

    A circular cache has one block for each request, even if the request has more positions.
    """
    count: int = -(-positions // spec.block_size) + getattr(spec, "num_speculative_blocks", 0)
    widest = getattr(spec, "max_num_blocks_per_req", None)
    return count if widest is None else min(count, widest(vllm_config, positions))


class SelfCheckRunner:
    """Runs requests through the worker's own ``execute_model``. Call :meth:`finish` at the end."""

    def __init__(self, worker: Any, steering: WorkerSteeringManager, config: SteeringConfig) -> None:
        self._worker, self._steering, self._config = worker, steering, config
        self._vocab_size = worker.vllm_config.model_config.get_vocab_size()
        crosses = any(point == "post_block" for point, _ in steering.decoder.gaps)  # layers with cross-attention
        self._encoder_inputs = [_ENCODER_INPUT] if crosses else []
        self._blocks = allocate_blocks(worker)
        self._running: set[str] = set()
        self._num_requests = 0

    def run(self, requests: Sequence[CheckRequest]) -> list[tuple[CheckRequest, dict[Site, Rows]]]:
        """Run requests in as few steps as the engine's limits allow.

        Returns:
            Each request with its captured rows, ``[TOKENS, hidden]`` float64 by site. Sites of other pipeline stages
            are missing; positions that were not stored are NaN.
        """
        size = self._batch_size(requests)
        batches = [requests[start : start + size] for start in range(0, len(requests), size)]
        return [result for batch in batches for result in self._step(batch)]

    def run_to_end(self, request: CheckRequest) -> tuple[dict[Site, Rows], Rows | None]:
        """Run one request and return its captured rows and its final hidden states.

        Sites of other pipeline stages are missing, and hidden states on all stages but the last.
        """
        found: list[Rows | None] = []
        ((_, rows),) = self._step([request], lambda: found.append(self._hidden_states()))
        return rows, found[0]

    def finish(self) -> None:
        """Remove the last step's requests from the runner."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids, self._running = self._running, set()
        self._execute(output)

    def _batch_size(self, requests: Sequence[CheckRequest]) -> int:
        config, scheduler = self._config, self._worker.vllm_config.scheduler_config
        captures = max([1, *(len(request.captures) for request in requests)])
        size: int = min(
            len(self._blocks),
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens // TOKENS,
            config.max_rows // NEEDED["max_rows"],
            config.max_vectors // NEEDED["max_vectors"],
            config.max_instructions // max(NEEDED["max_instructions"], captures),
            config.capture_rows // (TOKENS * captures),
        )
        return max(size, 1)

    def _step(
        self, requests: Sequence[CheckRequest], after_forward: Callable[[], None] | None = None
    ) -> list[tuple[CheckRequest, dict[Site, Rows]]]:
        names = [f"{_REQUEST_PREFIX}{self._num_requests + n}" for n in range(len(requests))]
        self._num_requests += len(requests)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            self._request(name, request, blocks)
            for name, request, blocks in zip(names, requests, self._blocks, strict=False)
        ]
        output.num_scheduled_tokens = dict.fromkeys(names, TOKENS)
        output.total_num_scheduled_tokens = TOKENS * len(names)
        output.finished_req_ids, self._running = self._running, set(names)
        output.num_spec_tokens_to_schedule = self._worker.vllm_config.num_speculative_tokens
        self._steering.tables.arena.fill_(torch.nan)
        self._execute(output)
        if after_forward is not None:
            # Before sampling: a drafter's graphs may share memory with the model's.
            after_forward()
        pending = self._steering.capture.take_rows()
        self._worker.sample_tokens(None)
        # The requests project nothing, so their rows have one format.
        (step,) = pending[0].wait() if pending else (None,)
        return [
            (request, {} if step is None else self._rows(step, name))
            for name, request in zip(names, requests, strict=True)
        ]

    def _hidden_states(self) -> Rows | None:
        state = self._worker.model_runner.execute_model_state
        hidden = None if state is None else state.hidden_states
        return None if hidden is None else hidden[:TOKENS].double().cpu().numpy()

    def _request(self, name: str, request: CheckRequest, blocks: tuple[list[int], ...]) -> NewRequestData:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        if request.edits or request.captures:
            params.extra_args = {PROGRAM_KEY: compile_program(request.edits, request.capture_specs()).to_bytes()}
        prompt = prompt_of(self._vocab_size, request.donor)
        return NewRequestData(
            req_id=name,
            prompt_token_ids=prompt,
            mm_features=self._encoder_inputs,
            sampling_params=params,
            pooling_params=None,
            block_ids=blocks,
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=prompt,
        )

    def _rows(self, step: StepRows, name: str) -> dict[Site, Rows]:
        dtype = self._steering.tables.arena.dtype
        found: dict[Site, Rows] = {}
        for entry in step.index.entries_of(name):
            codes, start, count = step.index.codes[entry], int(step.start[entry]), int(step.count[entry])
            rows = torch.from_numpy(step.rows_of(entry).copy()).view(dtype).double().numpy()
            rows = rows.reshape(count, len(codes), -1)
            for index, code in enumerate(codes):
                layer, point = divmod(code // 2, len(POINT_NAMES))
                site = POINT_NAMES[point], layer
                at_site = found.setdefault(site, np.full((TOKENS, rows.shape[-1]), np.nan))
                at_site[start : start + count] = rows[:, index]
        return found

    def _execute(self, output: SchedulerOutput) -> None:
        """Run a step without the KV connector; vLLM's worker handles pipeline stages."""
        connector: Any = getattr(self._worker.model_runner, "kv_connector", None)
        if not can_disable_connector(self._worker):
            self._worker.execute_model(output)
            return
        connector.set_disabled(True)
        try:
            self._worker.execute_model(output)
        finally:
            connector.set_disabled(False)

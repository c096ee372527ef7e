# SPDX-License-Identifier: Apache-2.0
"""Steering in vLLM's model runner V1 (``v1/worker/gpu_model_runner.py``), used on CPU and as a fallback on CUDA.

V1 reorders its persistent batch, so requests with a program have slots of their own. All plain requests share slot 0.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import repeat
from typing import Any

import numpy as np
import torch

from vllm_steer.compat.internals import FullAttentionSpec, get_pp_group, length_from_prompt_token_ids_or_embeds
from vllm_steer.engine.cpu_workarounds import no_draws_for_chunks
from vllm_steer.engine.model_output import attach_rows
from vllm_steer.engine.model_setup import set_up_steering
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.taps.assignment import BatchLayout

_REJECTED = -1
"""Token id that vLLM's rejection sampler gives to what it rejects."""


class SteeringRunnerV1:
    """Mixin ahead of the platform's V1 runner class."""

    steering: WorkerSteeringManager

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        max_requests = self.scheduler_config.max_num_seqs
        self.steering = set_up_steering(
            self.get_model(),
            self.vllm_config,
            self.device,
            max_tokens=self.max_num_tokens,
            max_requests=max_requests + 1,
            # V1 captures its CUDA graphs once, with every tap.
            separate_idle_graphs=self.device.type == "cpu",
        )
        if self.device.type == "cpu" and not get_pp_group().is_first_rank and self.intermediate_tensors is None:
            # vLLM creates this buffer in its profiling run, which its CPU worker skips for eager models.
            self.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        self._steer_free = list(range(max_requests, 0, -1))
        self._steer_order: list[str] = []
        self._steer_slot_of: dict[str, int] = {}
        self._steer_slots = np.empty(0, dtype=np.int64)
        self._steer_batch_slot = torch.zeros(max_requests, dtype=torch.int64, device=self.device)
        self.steering.allocated.append(self._steer_batch_slot)
        self._steer_tokens = 0
        self._steer_counts: dict[str, int] = {}

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        steering: WorkerSteeringManager = self.steering
        removed = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for request_id in removed:
            self._steer_unbind(request_id)
        # A new request of the same step may have the id of one that has ended.
        steering.store.forget_strengths(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            self._steer_unbind(new.req_id)
            prompt_len = length_from_prompt_token_ids_or_embeds(new.prompt_token_ids, new.prompt_embeds)
            self._steer_bind(new.req_id, new.sampling_params, prompt_len)
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            if request_id not in self._steer_slot_of:
                state = self.requests[request_id]
                self._steer_bind(request_id, state.sampling_params, state.num_prompt_tokens)
        steering.receive_replays(scheduler_output)
        self._steer_tokens = scheduler_output.total_num_scheduled_tokens
        self._steer_counts = scheduler_output.num_scheduled_tokens
        return result

    def _zero_block_ids(self: Any, block_ids: list[int]) -> None:
        super()._zero_block_ids(block_ids)  # type: ignore[misc]
        groups = self.kv_cache_config.kv_cache_groups
        if self.device.type == "cpu" and not all(isinstance(each.kv_cache_spec, FullAttentionSpec) for each in groups):
            # vLLM zeroes the blocks of full-attention layers only.
            for cache in self.kv_caches:
                cache.unflatten(0, (self.kv_cache_config.num_blocks, -1))[block_ids] = 0

    def _steer_bind(self: Any, request_id: str, sampling_params: Any, prompt_len: int) -> None:
        if self.steering.store.add(request_id, self._steer_free[-1], sampling_params, prompt_len):
            self._steer_slot_of[request_id] = self._steer_free.pop()
            self._steer_order = []

    def _steer_unbind(self: Any, request_id: str) -> None:
        slot = self._steer_slot_of.pop(request_id, None)
        if slot is not None:
            self.steering.store.remove(request_id)
            self._steer_free.append(slot)
            self._steer_order = []

    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        steering: WorkerSteeringManager = self.steering
        steering.begin(lambda: self._steer_step_batch(kwargs))
        output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        steering.end_step()
        return output

    def _steer_step_batch(self: Any, inputs: dict[str, Any]) -> StepBatch:
        ids = self.input_batch.req_ids
        requests = len(ids)
        if ids != self._steer_order:
            slots = np.fromiter(map(self._steer_slot_of.get, ids, repeat(0)), np.int64, requests)
            host = torch.from_numpy(slots)
            if self.device.type == "cuda":
                host = host.pin_memory()
            self._steer_batch_slot[:requests].copy_(host, non_blocking=True)
            self._steer_order, self._steer_slots = list(ids), slots
        tokens = self._steer_tokens
        model_input = inputs.get("input_ids")
        if model_input is None:
            model_input = inputs.get("inputs_embeds")
        return StepBatch(
            layout=lambda: BatchLayout(
                request_slot=self._steer_batch_slot[:requests],
                start=self.query_start_loc.gpu[: requests + 1],
                position=self.positions[:tokens],
                token=self.input_ids.gpu[:tokens],
            ),
            ids=ids,
            request_slot=self._steer_slots,
            first=self.input_batch.num_computed_tokens_cpu[:requests].astype(np.int64),
            count=np.fromiter(map(self._steer_counts.__getitem__, ids), np.int64, requests),
            num_padded=tokens if model_input is None else model_input.shape[0],
        )

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if spec_decode_metadata is None:
            return output
        kept = self.steering.accepted_tokens(lambda: _num_drafts(spec_decode_metadata))
        if kept is not None:
            columns = torch.arange(output.sampled_token_ids.shape[1], device=self.device)
            output.sampled_token_ids.masked_fill_(columns >= kept.unsqueeze(1), _REJECTED)
        return output

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        with no_draws_for_chunks(self) if self.device.type == "cpu" else nullcontext():
            output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        return attach_rows(output, self.steering.take_rows())

    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.steering.graph_sets.capture_all_taps():
            return super().capture_model(*args, **kwargs)  # type: ignore[misc]

    def profile_run(self: Any, *args: Any, **kwargs: Any) -> None:
        super().profile_run(*args, **kwargs)  # type: ignore[misc]
        self.steering.graph_sets.compile_untapped(
            lambda tokens: self._dummy_run(tokens, is_profile=True)[0], self.max_num_tokens
        )
        self.steering.heads.warm_up()

    def _dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.steering.begin_idle_step()
        output = super()._dummy_run(*args, **kwargs)  # type: ignore[misc]
        self.steering.graph_sets.restore_model()
        return output


def _num_drafts(metadata: Any) -> torch.Tensor:
    """Return the number of draft tokens of each request of a step, ``[requests]`` on the device."""
    total = metadata.cu_num_draft_tokens
    return torch.diff(total, prepend=total.new_zeros(1))

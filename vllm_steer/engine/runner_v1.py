# SPDX-License-Identifier: Apache-2.0
"""Steering in vLLM's runner V1 (``v1/worker/gpu_model_runner.py``): the CPU build's runner, and CUDA's fallback.

V1 keeps one persistent batch whose order changes, so this keeps slots of its own; slot 0 is that of all plain requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.utils import length_from_prompt_token_ids_or_embeds

from vllm_steer.engine.collect import attach
from vllm_steer.engine.steering import Steering, StepBatch


class SteeringRunnerV1:
    """Mixed in front of the platform's V1 runner class."""

    steering: Steering

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        max_requests = self.scheduler_config.max_num_seqs
        self.steering = Steering(
            self.get_model(),
            self.vllm_config,
            self.device,
            max_tokens=self.max_num_tokens,
            max_requests=max_requests + 1,
        )
        # Preempted requests keep their slots, so there can be more of them than places in a batch.
        self._steer_free = list(range(max_requests, 0, -1))
        self._steer_order: list[str] = []
        self._steer_batch_slot = torch.zeros(max_requests, dtype=torch.int32, device=self.device)
        self._steer_tokens = 0
        self._steer_counts: dict[str, int] = {}

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        steering: Steering = self.steering
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for request_id in gone:
            self._steer_release(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._steer_release(new.req_id)
            prompt_len = length_from_prompt_token_ids_or_embeds(new.prompt_token_ids, new.prompt_embeds)
            self._steer_bind(new.req_id, new.sampling_params, prompt_len)
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            if steering.store.slot_of(request_id) is None:
                state = self.requests[request_id]
                self._steer_bind(request_id, state.sampling_params, state.num_prompt_tokens)
        self._steer_tokens = scheduler_output.total_num_scheduled_tokens
        self._steer_counts = scheduler_output.num_scheduled_tokens
        return result

    def _steer_bind(self: Any, request_id: str, sampling_params: Any, prompt_len: int) -> None:
        if self.steering.store.add(request_id, self._steer_free[-1], sampling_params, prompt_len):
            self._steer_free.pop()
            self._steer_order = []

    def _steer_release(self: Any, request_id: str) -> None:
        slot = self.steering.store.remove(request_id)
        if slot is not None:
            self._steer_free.append(slot)
            self._steer_order = []

    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        steering: Steering = self.steering
        if steering.active:
            order = self.input_batch.req_ids
            if order != self._steer_order:
                slots = np.fromiter((steering.store.slot_of(name) or 0 for name in order), np.int32, len(order))
                staged = torch.from_numpy(slots)
                if self.device.type == "cuda":
                    staged = staged.pin_memory()
                self._steer_batch_slot[: len(order)].copy_(staged, non_blocking=True)
                self._steer_order = list(order)
            tokens = self._steer_tokens
            row_of_token = self.req_indices.gpu[:tokens].long()
            inputs = kwargs.get("input_ids")
            if inputs is None:
                inputs = kwargs.get("inputs_embeds")
            steering.begin_step(
                StepBatch(
                    slot=self._steer_batch_slot[row_of_token],
                    position=self.positions[:tokens],
                    num_padded=tokens if inputs is None else inputs.shape[0],
                    requests=self._steer_requests() if steering.store.num_capturing else (),
                )
            )
        else:
            steering.begin_idle_step()
        output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        steering.end_step()
        return output

    def _steer_requests(self: Any) -> list[tuple[str, int, int]]:
        first = self.input_batch.num_computed_tokens_cpu
        return [(name, int(first[row]), self._steer_counts[name]) for row, name in enumerate(self.input_batch.req_ids)]

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        return attach(output, self.steering.take_rows())

    def _dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.steering.begin_idle_step()
        return super()._dummy_run(*args, **kwargs)  # type: ignore[misc]

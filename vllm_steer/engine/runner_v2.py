# SPDX-License-Identifier: Apache-2.0
"""Steering in vLLM's model runner V2 (``v1/worker/gpu/model_runner.py``), the default on CUDA.

V2 gives each model a ``ModelState`` with hooks around a step. After loading, the class of that object is replaced by a
subclass, so every kind of state is supported: default, hybrid, encoder-decoder or a model's own. Requests use V2's
slots. Dummy batches use slots of real requests too, so a step counts as real only after ``preprocess_state``, which V2
calls for real batches only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from vllm_steer.engine.model_output import attach_rows
from vllm_steer.engine.model_setup import set_up_steering
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.taps.assignment import BatchLayout


class SteeringRunnerV2:
    """Mixin ahead of the platform's V2 runner class."""

    steering: WorkerSteeringManager

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.steering = set_up_steering(
            self.model,
            self.vllm_config,
            self.device,
            max_tokens=self.max_num_tokens,
            max_requests=self.max_num_reqs,
            separate_idle_graphs=True,
        )
        self.steering.heads.joins = True
        state = self.model_state
        base: Any = type(state)
        state.__class__ = _steering_state(base)
        state.steering = self.steering
        state.steering_step_is_real = False

    def profile_run(self: Any, *args: Any, **kwargs: Any) -> None:
        super().profile_run(*args, **kwargs)  # type: ignore[misc]
        self.steering.graph_sets.compile_untapped(
            lambda tokens: self._dummy_run(tokens, skip_attn=True, is_profile=True)[0], self.max_num_tokens
        )
        self.steering.heads.warm_up()

    def profile_cudagraph_memory(self: Any) -> Any:
        # vLLM estimates the memory of one set of graphs.
        measured = super().profile_cudagraph_memory()  # type: ignore[misc]
        self.steering.graph_sets.restore_model()
        return self.steering.graph_sets.memory_of_all_sets(measured)

    def capture_model(self: Any, *, profile_only: bool = False) -> Any:
        if self.cudagraph_manager is not None:
            sets = self.steering.graph_sets
            if profile_only:
                sets.observe_profiling(self.cudagraph_manager)
            else:
                sets.wrap_capture(self.cudagraph_manager, lambda: self.steering.active)
        return super().capture_model(profile_only=profile_only)  # type: ignore[misc]

    def add_requests(self: Any, scheduler_output: Any) -> None:
        # vLLM has removed the requests that ended. A new one may have the id of one of them.
        self.steering.store.forget_strengths(scheduler_output.finished_req_ids)
        super().add_requests(scheduler_output)  # type: ignore[misc]
        self.steering.receive_replays(scheduler_output)

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        self.steering.end_step()
        return output

    def sample(self: Any, hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.steering.heads.joined(self.model):
            result = super().sample(hidden_states, input_batch, *args, **kwargs)  # type: ignore[misc]
        self.steering.finish_readouts()
        kept = self.steering.accepted_tokens(lambda: input_batch.cu_num_logits[: input_batch.num_reqs + 1].diff() - 1)
        if kept is not None:
            _, num_sampled, num_rejected = result
            dropped = (num_sampled - kept).clamp_(min=0)
            # The sampler's output refers to the same tensors.
            num_sampled -= dropped
            num_rejected += dropped
        return result

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        return attach_rows(output, self.steering.take_rows())


@cache
def _steering_state(base: Any) -> Any:
    """Return a subclass of a ``ModelState`` class that tracks programs and prepares steps."""

    class SteeringModelState(base):  # type: ignore[misc]
        steering: WorkerSteeringManager
        steering_step_is_real: bool

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            self.steering.store.add(
                new_req_data.req_id, req_index, new_req_data.sampling_params, new_req_data.prompt_len
            )

        def remove_request(self, req_id: str) -> None:
            self.steering.store.remove(req_id)
            super().remove_request(req_id)

        def preprocess_state(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
            super().preprocess_state(input_batch, *args, **kwargs)
            self.steering_step_is_real = True

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
            if self.steering_step_is_real:
                self.steering.begin(lambda: _step_batch(input_batch))
            else:
                self.steering.begin_idle_step()
            self.steering_step_is_real = False
            result: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
            return result

        def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
            self.steering.begin_idle_step()
            result: dict[str, Any] = super().prepare_dummy_inputs(num_reqs, num_tokens)
            return result

    return SteeringModelState


def _step_batch(input_batch: Any) -> StepBatch:
    requests = input_batch.num_reqs
    return StepBatch(
        layout=lambda: BatchLayout(
            request_slot=input_batch.idx_mapping[:requests],
            start=input_batch.query_start_loc[: requests + 1],
            position=input_batch.positions[: input_batch.num_tokens],
            token=input_batch.input_ids[: input_batch.num_tokens],
        ),
        ids=input_batch.req_ids,
        request_slot=input_batch.idx_mapping_np[:requests],
        # vLLM's arrays are int32; the front end decodes int64.
        first=input_batch.num_computed_tokens_np[:requests].astype(np.int64),
        count=input_batch.num_scheduled_tokens[:requests].astype(np.int64),
        num_padded=input_batch.num_tokens_after_padding,
    )

# SPDX-License-Identifier: Apache-2.0
"""The worker that ``worker_cls`` names: the platform's own, with a runner that steers.

One qualified name serves every platform; the base class is chosen when the worker process imports this module.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_steer.engine.model_output import attach_stats
from vllm_steer.engine.runner_v1 import SteeringRunnerV1
from vllm_steer.engine.runner_v2 import SteeringRunnerV2
from vllm_steer.engine.self_check import self_check


def _platform_worker() -> Any:
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    if current_platform.is_cuda_alike():
        from vllm.v1.worker.gpu_worker import Worker

        return Worker
    raise RuntimeError(f"steering runs on CPU and CUDA; this is {current_platform.device_name}")


@cache
def _steering_runner(base: Any) -> Any:
    """The runner class with steering in front, for whichever runner vLLM chose."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    mixin = SteeringRunnerV1 if issubclass(base, RunnerV1) else SteeringRunnerV2
    return type(f"Steering{base.__name__}", (mixin, base), {})


class SteeringWorker(_platform_worker()):  # type: ignore[misc]
    """Named by ``--enable-steering`` as vLLM's ``worker_cls``."""

    model_runner: Any
    _steering_asleep: dict[str, torch.Tensor] | None = None

    def init_device(self) -> None:
        super().init_device()
        # vLLM's CPU worker builds its runner inside init_device (v1/worker/cpu_worker.py), so there is no factory to
        # override on every platform; the class is changed before anything is loaded.
        chosen: Any = type(self.model_runner)
        self.model_runner.__class__ = _steering_runner(chosen)

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if self.device.type == "cuda":
            # vLLM takes what its own loading allocated for all that was there before it profiles a forward pass, and
            # would give the tables' memory to the KV cache once more.
            self.model_runner.model_memory_usage += self.model_runner.steering.tables.num_bytes

    def sleep(self, level: int = 1) -> None:
        # The tables lie in the memory pool of the weights. Level 1 keeps what is in it, level 2 does not.
        if level == 2:
            self._steering_asleep = self.model_runner.steering.tables.saved()
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if self._steering_asleep is not None and (tags is None or "weights" in tags):
            self.model_runner.steering.tables.restore(self._steering_asleep)
            self._steering_asleep = None

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return attach_stats(super().sample_tokens(*args, **kwargs), self.model_runner.steering.take_stats())

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's last step before it serves; then, on the path that serves, the check of the taps."""
        times = super().compile_or_warm_up_model()
        self.model_runner.steering.self_check = self_check(self)
        return times

    def steering_capabilities(self) -> dict[str, Any]:
        """RPC: what this rank serves, see :meth:`vllm_steer.engine.worker_manager.Steering.capabilities`."""
        return self.model_runner.steering.capabilities()  # type: ignore[no-any-return]

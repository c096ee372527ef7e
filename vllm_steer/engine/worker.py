# SPDX-License-Identifier: Apache-2.0
"""The worker that ``worker_cls`` names: the platform's own, with a runner that steers.

One qualified name serves every platform; the base class is chosen when the worker process imports this module.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.platforms import current_platform

from vllm_steer.engine.runner_v1 import SteeringRunnerV1
from vllm_steer.engine.runner_v2 import SteeringRunnerV2


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

    def init_device(self) -> None:
        super().init_device()
        # vLLM's CPU worker builds its runner inside init_device (v1/worker/cpu_worker.py), so there is no factory to
        # override on every platform; the class is changed before anything is loaded.
        chosen: Any = type(self.model_runner)
        self.model_runner.__class__ = _steering_runner(chosen)

    def steering_capabilities(self) -> dict[str, Any]:
        """RPC: what this rank serves, see :meth:`vllm_steer.engine.steering.Steering.capabilities`."""
        return self.model_runner.steering.capabilities()  # type: ignore[no-any-return]

# SPDX-License-Identifier: Apache-2.0
"""The worker class that ``--enable-steering`` sets as vLLM's ``worker_cls``.

The base class is the platform's worker, chosen when the worker process imports this module.
"""

from __future__ import annotations

import signal
from functools import cache
from typing import Any

from vllm_steer.compat.internals import current_platform
from vllm_steer.compat.stages import BUSY_LOOPS, CPU_LORA, LOGGING
from vllm_steer.compat.wraps import install
from vllm_steer.config import has_worker_processes
from vllm_steer.engine.model_output import attach_failed, attach_stats
from vllm_steer.engine.runner_v1 import SteeringRunnerV1
from vllm_steer.engine.runner_v2 import SteeringRunnerV2
from vllm_steer.engine.self_check import self_check
from vllm_steer.engine.worker_manager import SavedState
from vllm_steer.errors import SteeringError


def _platform_worker() -> Any:
    if current_platform.is_cpu():
        from vllm_steer.compat.internals import CPUWorker

        return CPUWorker
    if current_platform.is_cuda_alike():
        from vllm_steer.compat.internals import Worker

        return Worker
    raise RuntimeError(f"steering supports CPU and CUDA, not {current_platform.device_name}")


@cache
def _steering_runner(base: Any) -> Any:
    """Return a subclass of vLLM's runner class ``base`` that steers."""
    from vllm_steer.compat.internals import GPUModelRunner as RunnerV1

    mixin = SteeringRunnerV1 if issubclass(base, RunnerV1) else SteeringRunnerV2
    return type(f"Steering{base.__name__}", (mixin, base), {})


class SteeringWorker(_platform_worker()):  # type: ignore[misc]
    """The platform's worker with a steering model runner."""

    model_runner: Any
    _saved: SavedState | None = None

    def init_device(self) -> None:
        install((*LOGGING, *BUSY_LOOPS))
        if current_platform.is_cpu() and self.vllm_config.lora_config is not None:
            install(CPU_LORA)
        if has_worker_processes(self.vllm_config):
            # Ctrl-C interrupts all processes of the terminal. If the worker ended before the engine, the engine would
            # report a fatal error. The executor ends the worker by closing a pipe, or with SIGTERM.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        super().init_device()
        # vLLM's CPU worker has no factory method for its runner (v1/worker/cpu_worker.py), so the runner's class is
        # changed before it loads the model.
        chosen: Any = type(self.model_runner)
        self.model_runner.__class__ = _steering_runner(chosen)

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if self.device.type == "cuda":
            # vLLM counts only the weights as memory in use before profiling, and would give the tables' memory to the
            # KV cache.
            self.model_runner.model_memory_usage += self.model_runner.steering.num_bytes

    def sleep(self, level: int = 1) -> None:
        # Level 2 discards the memory pool of the weights, which holds all tensors allocated in load_model.
        if level == 2:
            self._saved = self.model_runner.steering.save()
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if self._saved is not None and (tags is None or "weights" in tags):
            self.model_runner.steering.restore(self._saved)
            self._saved = None

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        steering = self.model_runner.steering
        output = attach_stats(super().sample_tokens(*args, **kwargs), steering.take_stats())
        return output if steering.hooks is None else attach_failed(output, steering.hooks.take_failed())

    def compile_or_warm_up_model(self) -> Any:
        """Run vLLM's last step of the startup, then the self-check on the code path that will serve."""
        times = super().compile_or_warm_up_model()
        self.model_runner.steering.self_check = self_check(self)
        return times

    def steering_set_strength(self, live_ids: list[str], strengths: dict[str, float]) -> list[int]:
        """Set live strengths. Called by RPC; see :meth:`ProgramStore.set_strengths`."""
        store = self.model_runner.steering.store
        return [store.set_strengths(live_id, strengths) for live_id in live_ids]

    def steering_register_hook(self, number: int, function: Any, point: Any, layers: list[int]) -> None:
        """Register a user hook. Called by RPC; see :meth:`UserHooks.register`.

        Raises:
            SteeringError: The engine was started without user hooks.
        """
        hooks = self.model_runner.steering.hooks
        if hooks is None:
            raise SteeringError("steering_config.user_hooks", "is off")
        hooks.register(number, function, point, layers)

    def steering_remove_hook(self, number: int) -> None:
        """Remove a user hook. Called by RPC."""
        if self.model_runner.steering.hooks is not None:
            self.model_runner.steering.hooks.remove(number)

    def steering_capabilities(self) -> dict[str, Any]:
        """Return what this rank serves. Called by RPC; see :meth:`WorkerSteeringManager.capabilities`."""
        return self.model_runner.steering.capabilities()  # type: ignore[no-any-return]

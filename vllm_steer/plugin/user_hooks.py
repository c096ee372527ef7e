# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM that conflict with user hooks."""

from __future__ import annotations

from typing import Any

from vllm_steer.compat.version import Conflict
from vllm_steer.config import from_vllm_config
from vllm_steer.errors import IncompatibleError

OFFLINE_ONLY = "steering_config.user_hooks: functions run in engines of LLM only, never in a server or AsyncLLM"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "CUDA graphs",
        lambda c: _has_cuda_graphs(c),
        "a graph replays kernels and runs no functions; set enforce_eager=True, or "
        'compilation_config={"cudagraph_mode": "NONE"} to keep compiled code',
    ),
    Conflict(
        "speculative decoding",
        lambda c: c.speculative_config is not None,
        "positions of drafts are known on the device only; start the engine without it",
    ),
    Conflict(
        "several workers",
        lambda c: c.parallel_config.world_size_across_dp > 1 or c.parallel_config.distributed_executor_backend != "uni",
        "functions run in one worker; set tensor, pipeline and data parallel sizes to 1, and "
        'distributed_executor_backend="uni"',
    ),
)


def _has_cuda_graphs(vllm_config: Any) -> bool:
    from vllm_steer.compat.internals import CUDAGraphMode, current_platform

    return not current_platform.is_cpu() and vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE


def check_user_hooks(vllm_config: Any, *, asynchronous: bool) -> None:
    """Raise :class:`IncompatibleError` if user hooks are on in an engine that cannot run them.

    Args:
        vllm_config: vLLM's configuration.
        asynchronous: Whether the engine is for a server or an ``AsyncLLM``.
    """
    config = from_vllm_config(vllm_config)
    if config is None or not config.user_hooks:
        return
    if asynchronous:
        raise IncompatibleError(OFFLINE_ONLY)
    found = [conflict for conflict in CONFLICTS if conflict.present(vllm_config)]
    if found:
        reasons = "; ".join(f"{conflict.setting}: {conflict.reason}" for conflict in found)
        raise IncompatibleError(f"steering_config.user_hooks cannot be combined with {reasons}.")

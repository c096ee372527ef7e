# SPDX-License-Identifier: Apache-2.0
"""Selection of one of vLLM's two model runners, independent of earlier tests in the same process."""

from __future__ import annotations

from typing import Any

import pytest

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"


def choose_runner(patch: pytest.MonkeyPatch, version: str) -> None:
    """Set ``VLLM_USE_V2_MODEL_RUNNER`` to ``version``, "1" or "0"."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled

    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", version)
    # V1 disables graph capture in the process after its own capture, and V2 would then fail.
    set_cudagraph_capturing_enabled(True)


def runner_of(llm: Any) -> str:
    """Return the module of the vLLM runner class that ours extends."""
    return str(type(llm.llm_engine.model_executor.driver_worker.worker.model_runner).__mro__[2].__module__)

# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's two model runners an engine of these tests gets, whatever ran before it in the same process."""

from __future__ import annotations

from typing import Any

import pytest

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"


def choose_runner(patch: pytest.MonkeyPatch, version: str) -> None:
    """``version``: what ``VLLM_USE_V2_MODEL_RUNNER`` is set to, "1" or "0"."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled

    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", version)
    # V1 forbids the process to capture graphs when it has its own; V2, which never asks, would fail.
    set_cudagraph_capturing_enabled(True)


def runner_of(llm: Any) -> str:
    """The module of vLLM's runner class below ours."""
    return str(type(llm.llm_engine.model_executor.driver_worker.worker.model_runner).__mro__[2].__module__)

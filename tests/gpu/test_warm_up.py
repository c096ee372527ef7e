# SPDX-License-Identifier: Apache-2.0
"""GPU: our kernels are compiled during engine start, and none after vLLM starts to watch for compilations."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.test_engine import HIDDEN, model, requests
from vllm_steer import LLM, SamplingParams
from vllm_steer.taps import assignment_kernel, projection_kernel, tap_kernel

__all__ = ["model"]
pytestmark = pytest.mark.gpu

KERNELS = (
    tap_kernel._tap_kernel,
    assignment_kernel._rows_kernel,
    assignment_kernel._arena_offsets_kernel,
    projection_kernel._products_kernel,
)


@pytest.fixture
def compiled_late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the names of kernels that are compiled after vLLM's monitor starts (vllm/utils/jit_monitor.py)."""
    from triton import knobs
    from vllm.utils import jit_monitor

    names: list[str] = []

    def compiled(*, fn: Any, **_: Any) -> None:
        if jit_monitor.is_active():
            names.append(fn.name.rpartition(".")[2])

    # Reset the state that an earlier engine of this process left in the monitor and the kernel caches.
    monkeypatch.setattr(jit_monitor, "_active", False)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", compiled)
    for each in KERNELS:
        each.device_caches.clear()
    yield names


def serve(folder: Path) -> None:
    """Start an engine with CUDA graphs and run edits of every kind, and captures with and without directions.

    vLLM does not watch eager engines.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(folder), enable_steering=True, dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True,
        gpu_memory_utilization=0.02, kv_cache_memory_bytes=1 << 30, max_num_seqs=64,
    )  # fmt: skip
    try:
        check_pool(llm.llm_engine.model_executor.driver_worker.worker.model_runner.cudagraph_manager)
        prompts, params = requests()
        probes = np.random.default_rng(0).standard_normal((17, HIDDEN)).astype("f4")
        for i, more in enumerate(({}, {"reduce": {"directions": probes[:1]}}, {"reduce": {"directions": probes}})):
            read = {"hooks": {"post_block": "all"}, "positions": ("all", "last_prompt", "all_generated")[i], **more}
            params[3 * i] = SamplingParams(max_tokens=24, temperature=0, detokenize=False, capture={"memory": read})
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [outputs[3 * i].capture_results["memory"].status for i in range(3)] == ["ok"] * 3
    finally:
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        cleanup_dist_env_and_memory()


def check_pool(manager: Any) -> None:
    """Catches sets of graphs that allocate buffers of their own, because each was captured on another stream."""
    segments = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(manager.pool)]
    assert segments and len({each["stream"] for each in segments}) == 1


def own_kernels(compiled_late: list[str]) -> set[str]:
    return set(compiled_late) & {each.__name__ for each in KERNELS}


def test_no_kernel_of_ours_is_compiled_while_serving(model: Path, compiled_late: list[str]) -> None:
    """Catches a first request that waits for a compiler, and an engine that ``--jit-monitor-mode error`` ends."""
    serve(model)
    assert own_kernels(compiled_late) == set()


@pytest.mark.parametrize(
    ("module", "name"),
    [(assignment_kernel, "_arena_offsets_kernel"), (projection_kernel, "_products_kernel")],
    ids=["rows", "products"],
)
def test_detects_a_kernel_without_warm_up(
    module: Any, name: str, model: Path, compiled_late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a kernel that is not compiled at start."""
    monkeypatch.setattr(module, "warm_up", lambda *_: None)
    serve(model)
    assert name in own_kernels(compiled_late)

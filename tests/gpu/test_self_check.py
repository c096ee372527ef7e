# SPDX-License-Identifier: Apache-2.0
"""GPU: the self-check at engine start, on both runners, with and without CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.runner import choose_runner
from tests.gpu.test_engine import VARIANTS, model
from tests.wrong_taps import WRONG
from vllm_steer import LLM
from vllm_steer.models import install
from vllm_steer.models.self_check_plan import SelfCheckError

__all__ = ["model"]
pytestmark = pytest.mark.gpu


@contextmanager
def engine(model: Path, variant: str, monkeypatch: pytest.MonkeyPatch, dtype: str) -> Iterator[LLM]:
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = dict(VARIANTS[variant])
    choose_runner(monkeypatch, str(settings.pop("runner", "1")))
    # Keep wrong taps of one test out of the compile cache of the next.
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    llm = None
    try:
        llm = LLM(
            model=str(model), enable_steering=True, dtype=dtype, max_model_len=512, skip_tokenizer_init=True,
            gpu_memory_utilization=0.02, kv_cache_memory_bytes=1 << 30, max_num_seqs=64, **settings,
        )  # fmt: skip
        yield llm
    finally:
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_right_taps_pass(variant: str, dtype: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that rejects right taps because of rounding, or that graphs make ineffective."""
    with engine(model, variant, monkeypatch, dtype) as llm:
        (report,) = llm.collective_rpc("steering_capabilities")
    found: dict[str, Any] = report["self_check"]
    assert (found["ran"], found["hops"]) == (True, 8)
    assert found["conclusive"] >= (8 if dtype == "float32" else 6)


@pytest.mark.parametrize("wrong", [each for each in WRONG if each.model == "llama"], ids=str)
def test_wrong_taps_are_rejected(wrong: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that passes any taps once they are captured in a graph."""
    monkeypatch.setattr(install, wrong.replaces, wrong.maker)
    with (
        pytest.raises(SelfCheckError, match=f"{wrong.point} of layer 0"),
        engine(model, "v2-graphs", monkeypatch, "bfloat16"),
    ):
        pytest.fail("the engine started")

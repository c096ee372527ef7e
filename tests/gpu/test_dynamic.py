# SPDX-License-Identifier: Apache-2.0
"""GPU: gates and stops with CUDA graphs and eager, under both runners, against a token-by-token reference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Triton multiplies float32 in TF32 by default, which changes scores by more than the distance from their bounds.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

from tests.engine import hf
from tests.engine.conftest import close
from tests.engine.drafter_cases import save_draft_model
from tests.engine.record_cases import GENERATED, PROMPTS, READOUTS, bounds_of, cases, check, run_all
from tests.engine.record_reference import Reference
from tests.gpu.runner import V1, V2, choose_runner, runner_of
from tests.tiny import make_llm, save_tiny_llama

pytestmark = pytest.mark.gpu

VARIANTS: dict[str, dict[str, Any]] = {
    "v2-graphs": {"enforce_eager": False},
    "v2-eager": {},
    "v1-graphs": {"enforce_eager": False},
    "v2-graphs, small cache": {
        "enforce_eager": False, "num_gpu_blocks_override": 16, "block_size": 16, "max_num_batched_tokens": 24,
        "max_num_seqs": 12, "max_model_len": 128,
    },
    "v2-drafts": {"enforce_eager": False},
    "v1-drafts": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def truth(model: Any) -> Any:
    """Return the cases and what the reference does with each prompt."""
    loaded = hf.load(model)
    reference = Reference(loaded, loaded.model.layers)
    made = cases(bounds_of(reference))
    return made, {
        (name, number): reference.run(tokens, GENERATED, READOUTS, case.get("edits", ()), case.get("stops", ()))
        for name, case in made.items()
        for number, tokens in enumerate(PROMPTS)
    }


@pytest.fixture(params=list(VARIANTS))
def engine(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    extra: dict[str, Any] = {}
    if request.param.endswith("drafts"):
        drafter = save_draft_model(model, tmp_path_factory.mktemp("drafter") / "model")
        extra["speculative_config"] = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3}
    with pytest.MonkeyPatch.context() as patch:
        old = request.param.startswith("v1")
        choose_runner(patch, "0" if old else "1")
        settings = {"max_num_seqs": 64, "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 30}
        llm = make_llm(model, **{**settings, **VARIANTS[request.param], **extra})
        assert runner_of(llm) == (V1 if old else V2)
        yield llm
        close(llm)


def test_every_window_and_stop(engine: Any, truth: Any) -> None:
    """Catches a factor that a graph keeps from its capture, state of another request, and a stop that is late."""
    made, expected = truth
    for (name, number), output in run_all(engine, made).items():
        check(output, expected[name, number], len(PROMPTS[number]), f"{name}, prompt {number}")

# SPDX-License-Identifier: Apache-2.0
"""GPU: the chat model's 24 requests in one batch under CUDA graphs, float32 and bfloat16, against HF Transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Triton multiplies float32 in TF32 by default, which changes values by more than the tolerance.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

from tests.conformance.hf_reference import Reference
from tests.conformance.test_chat_model import (
    MODEL,
    Tolerance,
    answers,  # noqa: F401
    bound,  # noqa: F401
    load_reference,
    test_captured_rows_equal_hf,  # noqa: F401
    test_every_edit_matters,  # noqa: F401
    test_gates_open_where_the_score_is_high,  # noqa: F401
    test_log_probabilities_equal_hf,  # noqa: F401
    test_scores_and_lens_equal_hf,  # noqa: F401
    test_the_first_token_is_massive,  # noqa: F401
    test_the_template_marks_roles,  # noqa: F401
)
from tests.engine.conftest import close
from tests.tiny import make_llm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="the chat model is missing: run `make model`"),
]
TOLERANCES = {
    "float32": Tolerance(logprob=5e-3, row=5e-3, score=5e-2, effect=0.1),
    "bfloat16": Tolerance(logprob=0.5, row=0.08, score=0.5, effect=1.0),
}


@pytest.fixture(scope="module", params=list(TOLERANCES))
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tolerance(dtype: str) -> Tolerance:
    return TOLERANCES[dtype]


@pytest.fixture(scope="module")
def reference(dtype: str) -> Reference:
    return load_reference(getattr(torch, dtype))


@pytest.fixture(scope="module")
def llm(dtype: str) -> Iterator[Any]:
    engine = make_llm(
        MODEL, dtype=dtype, enforce_eager=False, skip_tokenizer_init=False, max_model_len=256, max_num_seqs=32,
        gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip
    yield engine
    close(engine)


def test_decode_steps_run_as_graphs(llm: Any) -> None:
    """Catches engines that fell back to eager execution, of which the other tests would notice nothing."""
    from vllm.config import CUDAGraphMode

    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    assert mode.decode_mode() == CUDAGraphMode.FULL

# SPDX-License-Identifier: Apache-2.0
"""GPU: edits that replace rows, with CUDA graphs and eager, under both runners, against HF Transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Triton multiplies float32 in TF32 by default, which changes values by more than the tolerance.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

from tests.engine import test_replace
from tests.engine.test_replace import (  # noqa: F401
    clean,
    model,
    test_a_row_one_position_off_is_seen,
    test_cached_blocks_belong_to_their_rows,
    test_edits_apply_in_order,
    test_replaced_rows_act_as_in_transformers,
    test_replaced_rows_are_captured_exactly,
    test_subspaces_change_only_their_component,
)
from tests.gpu.variants import VARIANTS, running
from vllm_steer.points import OPTIONAL_POINTS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=list(VARIANTS))
def llm(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        # The kernels of the reference on the CPU add in another order.
        patch.setattr(test_replace, "TOLERANCE", 4e-4)
        settings = {"max_num_batched_tokens": 64, "max_num_seqs": 32, "block_size": 32, "enable_prefix_caching": True}
        points = {"points": list(OPTIONAL_POINTS)}
        with running(request.param, tiny_llama, steering_config=points, **settings) as engine:
            yield engine

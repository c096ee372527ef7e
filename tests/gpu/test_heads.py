# SPDX-License-Identifier: Apache-2.0
"""GPU: readouts of the kinds ``lens`` and ``sae``, with CUDA graphs and eager, under both runners."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Triton multiplies float32 in TF32 by default, which changes values by more than the tolerance.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

from tests.engine.test_heads import (  # noqa: F401
    sae,
    test_features_equal_the_encoder,
    test_last_layer_equals_the_sampler,
    test_lens_changes_no_token,
)
from tests.gpu.variants import VARIANTS, running

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=list(VARIANTS))
def llm(request: pytest.FixtureRequest, tiny_llama: Path, sae: Path) -> Iterator[Any]:  # noqa: F811
    config = {"saes": {"tiny": str(sae)}, "record_columns": 32}
    with running(request.param, tiny_llama, steering_config=config, max_num_seqs=64) as engine:
        yield engine

# SPDX-License-Identifier: Apache-2.0
"""GPU: edits of features of an autoencoder, with CUDA graphs and eager, under both runners."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Triton multiplies float32 in TF32 by default, which changes values by more than the tolerance.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

from tests.engine.test_features import (
    ARRAYS,
    test_edits_equal_their_formula,  # noqa: F401
    test_gate_and_live_strength_scale_the_change,  # noqa: F401
)
from tests.gpu.variants import VARIANTS, running

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=list(VARIANTS))
def llm(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("sae")
    np.savez(folder / "params.npz", **ARRAYS)
    with running(request.param, tiny_llama, steering_config={"saes": {"tiny": str(folder)}}) as engine:
        yield engine

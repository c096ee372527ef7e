# SPDX-License-Identifier: Apache-2.0
"""Hook points of models with quantised weights or a quantised key-value cache, on vLLM's CPU kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.part import selected
from tests.conformance.quantised import CACHES, SCHEMES, Scheme, examine

# The first scheme that every CPU computes in every run, the others in turn, as the architectures.
ALWAYS = next(scheme for scheme in SCHEMES if not scheme.avx512)
TURN = [scheme for scheme in SCHEMES if scheme is ALWAYS or selected(scheme.name)]


def skip_without_kernel(scheme: Scheme) -> None:
    """Skip schemes whose kernels this CPU lacks."""
    if scheme.avx512 and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM's kernel for this scheme needs AVX-512")


@pytest.mark.feature("quantised weights: AWQ, GPTQ, int4, int8, FP8; NVFP4 and MXFP4 in plain torch", "steer")
@pytest.mark.feature("quantised weights: AWQ, GPTQ, int4, int8, FP8; NVFP4 and MXFP4 in plain torch", "capture")
@pytest.mark.parametrize("scheme", TURN, ids=str)
def test_hook_points_with_quantised_weights(scheme: Scheme, tmp_path: Path) -> None:
    """Catches edits and rows that quantised layers move, and weights that are read in another order."""
    skip_without_kernel(scheme)
    examine(scheme, tmp_path)


@pytest.mark.feature("quantised key-value cache: FP8", "steer")
@pytest.mark.feature("quantised key-value cache: FP8", "capture")
@pytest.mark.parametrize("scheme", CACHES, ids=str)
def test_hook_points_with_a_quantised_cache(scheme: Scheme, tmp_path: Path) -> None:
    """Catches edits that reach the cache of other tokens, and rows that change by more than the cache rounds."""
    skip_without_kernel(scheme)
    examine(scheme, tmp_path)

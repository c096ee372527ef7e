# SPDX-License-Identifier: Apache-2.0
"""Hook points of models with quantised weights or a quantised key-value cache, on vLLM's CPU kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.quantised import CACHES, SCHEMES, Scheme, examine
from tests.conformance.shard import selected
from tests.wrong_taps import late_layer
from vllm_steer.models import install

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


@pytest.mark.parametrize("scheme", [scheme for scheme in TURN if scheme.max_miss is not None], ids=str)
def test_wider_limits_reject_late_taps(scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a limit of a scheme's own that accepts edits one sublayer late."""
    skip_without_kernel(scheme)
    monkeypatch.setattr(install, "_pair_layer", late_layer("pair", "input_layernorm"))
    with pytest.raises(AssertionError, match="ablate at pre_attn of layer 1, by hooks: off by"):
        examine(scheme, tmp_path)

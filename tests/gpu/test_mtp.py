# SPDX-License-Identifier: Apache-2.0
"""GPU: layers for multi-token prediction (MTP) as drafter, with CUDA graphs, under both runners."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Triton multiplies float32 in TF32 by default, which changes scores by more than the distance from their bounds.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

from tests.conformance.no_reference import register_config
from tests.engine import drafts
from tests.engine.answers import run
from tests.engine.conftest import close
from tests.engine.drafter_cases import NUM_DRAFTS, PROMPTS, SMALL, check_outputs
from tests.engine.mtp_cases import ALL_POINTS, requests
from tests.engine.mtp_models import EVERY_RUN, MODELS, save
from tests.gpu.runner import V1, V2, choose_runner, runner_of
from tests.tiny import make_llm

pytestmark = pytest.mark.gpu

GRAPHS: dict[str, Any] = {
    **SMALL, **ALL_POINTS, "enforce_eager": False, "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 30,
}  # fmt: skip
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}}


@pytest.mark.parametrize(("family", "version"), [*((name, "1") for name in EVERY_RUN), (EVERY_RUN[0], "0")])
def test_matches_decoding_without_speculation(
    family: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows, gates and stops of rejected drafts in graphs, and graphs of the drafter that are steered."""
    register_config(family)
    choose_runner(monkeypatch, version)
    folder = save(MODELS[family], tmp_path / family)
    llm = make_llm(folder, **GRAPHS)
    try:
        right = run(llm, *requests())
    finally:
        close(llm)
    decided = (*drafts.truth_of(folder / "hf", PROMPTS[:2]), PROMPTS[:2])
    llm = make_llm(folder, **GRAPHS, **MTP)
    try:
        assert runner_of(llm) == (V2 if version == "1" else V1)
        check_outputs(llm, requests(), right)
        drafts.check_every_window(llm, decided)
    finally:
        close(llm)

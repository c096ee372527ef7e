# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-steer doctor`` finds in a configuration without weights, for settings of released checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.conformance import two_ranks
from tests.conformance.branches import BRANCHES, supported_branches
from tests.conformance.model import LAYERS, TinyModel, config_of
from tests.conformance.part import selected
from tests.conformance.zoo_settings import SETTINGS
from vllm_steer.models.outline import outline

ROWS = [tiny for tiny in SETTINGS if selected(tiny.name)]


def _outline(model: str) -> dict[str, Any]:
    """Return the facts as a child of ``doctor`` does, and leave no groups of ranks for the next model."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    try:
        return outline(model, {"points": list(BRANCHES)}, {})
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def _outline_of_row(name: str, folder: Path) -> dict[str, Any]:
    """Return the facts about a model of another platform, whose settings only the engine has."""
    with two_ranks.prepare(name):
        two_ranks.save(two_ranks.row(name), folder)
        facts = outline(str(folder / name), {}, {"swa_bounded_replay": False})
    return facts


@pytest.fixture(scope="module")
def vllm_process() -> Iterator[ProcessPoolExecutor]:
    """Return a process in which vLLM may initialise what it needs to build models."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize("tiny", ROWS, ids=str)
def test_outline_agrees_with_the_proven_row(tiny: TinyModel, vllm_process: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Catches a doctor that fails on a proven model, or reports other layers or points than its engine serves."""
    config = config_of(tiny)
    config.architectures = [tiny.architecture or getattr(transformers, tiny.auto)._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path)
    facts = vllm_process.submit(_outline, str(tmp_path)).result()
    assert "problem" not in facts, facts["problem"]
    assert {recipe["layer"].rpartition(".")[2] for recipe in facts["recipes"]} == tiny.layers
    assert facts["num_layers"] == LAYERS
    assert not facts["unproven"]
    refused = {point for point, layers in facts["refused"].items() if layers}
    assert refused == {*tiny.refused, *BRANCHES} - set(supported_branches(tiny))
    assert {point for point, layers in facts["unread"].items() if layers} >= set(tiny.unread)


@pytest.mark.skipif(not selected("deepseek_v41_engram"), reason="belongs to another part of the architectures")
def test_outline_does_not_allocate_the_tables_of_n_grams(tmp_path: Path) -> None:
    """Catches a doctor that allocates the tables in the host's memory, which on a machine without a GPU fails."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        facts = process.submit(_outline_of_row, "deepseek_v41_engram", tmp_path).result()
    assert "problem" not in facts, facts["problem"]
    assert facts["num_layers"] == LAYERS
    assert not facts["unproven"]

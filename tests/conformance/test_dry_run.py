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
from tests.conformance.kernels import media_stubs
from tests.conformance.model import LAYERS, TinyModel, config_of
from tests.conformance.shard import selected
from tests.conformance.zoo_settings import SETTINGS
from vllm_steer.models.dry_run import dry_run

ROWS = [tiny for tiny in SETTINGS if selected(tiny.name)]


def _dry_run(model: str) -> dict[str, Any]:
    """Return the facts as a child of ``doctor`` does, and leave no groups of ranks for the next model."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    try:
        with media_stubs():
            return dry_run(model, {"points": list(BRANCHES)}, {})
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def _dry_run_of_row(name: str, folder: Path) -> dict[str, Any]:
    """Return the facts about a model of another platform, whose settings only the engine has."""
    with two_ranks.prepare(name):
        two_ranks.save(two_ranks.row(name), folder)
        facts = dry_run(str(folder / name), {}, {"swa_bounded_replay": False})
    return facts


@pytest.fixture(scope="module")
def vllm_process() -> Iterator[ProcessPoolExecutor]:
    """Return a process in which vLLM may initialise what it needs to build models."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize("tiny", ROWS, ids=str)
def test_dry_run_agrees_with_the_proven_row(tiny: TinyModel, vllm_process: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Catches a doctor that fails on a proven model, or reports other layers or points than its engine serves."""
    config = config_of(tiny)
    config.architectures = [tiny.architecture or getattr(transformers, tiny.auto)._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path)
    facts = vllm_process.submit(_dry_run, str(tmp_path)).result()
    assert "problem" not in facts, facts["problem"]
    assert {recipe["layer"].rpartition(".")[2] for recipe in facts["recipes"]} == tiny.layers
    assert facts["num_layers"] == LAYERS
    assert not facts["unproven"]
    refused = {point for point, layers in facts["refused"].items() if layers}
    assert refused == {*tiny.refused, *BRANCHES} - set(supported_branches(tiny))
    assert {point for point, layers in facts["unread"].items() if layers} >= set(tiny.unread)


PUBLISHED: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "DeepseekV3Config": ("DeepseekV3ForCausalLM", {}, "DeepseekV2DecoderLayer", 61),
    "Qwen3NextConfig": ("Qwen3NextForCausalLM", {}, "Qwen3NextDecoderLayer", 48),
    "Qwen3_5MoeTextConfig": ("Qwen3_5MoeForCausalLM", {}, "Qwen3_5DecoderLayer", 40),
    "Glm4MoeConfig": ("Glm4MoeForCausalLM", {"head_dim": 128}, "Glm4MoeDecoderLayer", 46),
    "Glm4MoeLiteConfig": ("Glm4MoeLiteForCausalLM", {"first_k_dense_replace": 1}, "Glm4MoeLiteDecoderLayer", 47),
    "GptOssConfig": ("GptOssForCausalLM", {}, "TransformerBlock", 36),
    "MiniMaxM2Config": (
        "MiniMaxM2ForCausalLM",
        {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
        "MiniMaxM2DecoderLayer",
        62,
    ),
    "Gemma3nTextConfig": ("Gemma3nForCausalLM", {}, "Gemma3nDecoderLayer", 35),
    "Gemma4TextConfig": ("Gemma4ForCausalLM", {}, "Gemma4DecoderLayer", 30),
    "Llama4TextConfig": ("Llama4ForCausalLM", {}, "Llama4DecoderLayer", 48),
    "Ernie4_5_MoeConfig": ("Ernie4_5_MoeForCausalLM", {}, "Ernie4_5_MoeDecoderLayer", 28),
    "HrmTextConfig": ("HrmTextForCausalLM", {}, "HrmTextDecoderLayer", 128),
}
"""Config classes whose defaults are the sizes of a released model, with fields that only checkpoints have."""


def _save_published(name: str, folder: Path, **more: Any) -> None:
    architecture, fields, _, _ = PUBLISHED[name]
    config = getattr(transformers, name)(**fields, **more)
    config.architectures = [architecture]
    config.save_pretrained(folder)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if selected(name)])
def test_dry_run_of_published_sizes(name: str, vllm_process: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Catches a doctor that fails on a released model's sizes, or that needs memory for its weights."""
    _save_published(name, tmp_path)
    facts = vllm_process.submit(_dry_run, str(tmp_path)).result()
    assert "problem" not in facts, facts["problem"]
    _, _, layer, count = PUBLISHED[name]
    assert {recipe["layer"].rpartition(".")[2] for recipe in facts["recipes"]} == {layer}
    assert facts["num_layers"] == count
    assert not facts["unproven"]


@pytest.mark.skipif(not selected("DeepseekV3Config"), reason="belongs to another part of the architectures")
def test_dry_run_refuses_a_stream_that_float16_scales(vllm_process: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Catches a DeepSeek that is steered in float16, in which vLLM divides its stream by a factor."""
    _save_published("DeepseekV3Config", tmp_path, dtype="float16")
    facts = vllm_process.submit(_dry_run, str(tmp_path)).result()
    assert "scales the stream by 1 / routed_scaling_factor; use --dtype bfloat16" in facts["problem"]


@pytest.mark.skipif(not selected("deepseek_v41_engram"), reason="belongs to another part of the architectures")
def test_dry_run_does_not_allocate_the_tables_of_n_grams(tmp_path: Path) -> None:
    """Catches a doctor that allocates the tables in the host's memory, which on a machine without a GPU fails."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        facts = process.submit(_dry_run_of_row, "deepseek_v41_engram", tmp_path).result()
    assert "problem" not in facts, facts["problem"]
    assert facts["num_layers"] == LAYERS
    assert not facts["unproven"]

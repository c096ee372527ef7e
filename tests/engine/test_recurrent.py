# SPDX-License-Identifier: Apache-2.0
"""Recurrent models: chunked prompts, in batches and alone, give the same outputs.

Piecewise graphs exist on GPUs only (``tests/gpu/test_recurrent.py``); here the whole model is one traced graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

from tests.conformance.engine import GPU_SETTINGS, engine_settings
from tests.conformance.model import VOCAB, save
from tests.conformance.zoo import BY_NAME
from tests.engine.answers import logprobs_of, params, prompt, run
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import close
from tests.engine.test_mixing import program
from tests.tiny import make_llm

MODELS = ("mamba2", "lfm2")
"""A state-space model, and one with short convolutions and attention."""
ALONE: Mapping[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
PRESSED: Mapping[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
"""Prompts are chunked, and chunks share steps with generated tokens of other requests."""


@dataclass(frozen=True)
class Engine:
    """Engine under pressure, and the outputs of the same requests alone in the simplest engine."""

    llm: Any
    truth: list[Any]


def workload() -> tuple[list[Any], list[Any]]:
    """Return prompts of 5 to 50 tokens; two thirds are edited, half are captured at all sites."""
    rng = np.random.default_rng(16)
    prompts = [prompt(*rng.integers(1, VOCAB, int(rng.integers(5, 50))).tolist()) for _ in range(9)]
    wanted = [
        params(6, steering=program(i) if i % 3 else None, capture=capture() if i % 2 else None)
        for i in range(len(prompts))
    ]
    return prompts, wanted


def start(name: str, path: Path, mode: str, settings: Mapping[str, Any], **compilation: Any) -> Any:
    own = {"enforce_eager": False, **(GPU_SETTINGS if torch.cuda.is_available() else {})}
    own |= engine_settings(BY_NAME[name], mode)
    own["compilation_config"] = {**own.get("compilation_config", {}), **compilation}
    return make_llm(path, max_model_len=64, **own, **settings)


def answers_alone(name: str, path: Path) -> list[Any]:
    llm = start(name, path, "eager", ALONE)
    try:
        return run(llm, *workload())
    finally:
        close(llm)


@pytest.fixture(scope="module", params=MODELS)
def trunk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = save(BY_NAME[request.param], tmp_path_factory.mktemp(request.param))
    truth = answers_alone(request.param, path)
    llm = start(request.param, path, "traced", PRESSED)
    yield Engine(llm, truth)
    close(llm)
    torch._dynamo.reset()


def as_alone(llm: Any, truth: list[Any], atol: float = 2e-3) -> None:
    for i, (got, right) in enumerate(zip(run(llm, *workload()), truth, strict=True)):
        np.testing.assert_allclose(logprobs_of(got), logprobs_of(right), atol=atol, err_msg=f"request {i}")
        if i % 2:
            close_to(result(got), result(right), i, atol)


@pytest.mark.failure(16)
@pytest.mark.feature("recurrent layers", "steer", "capture")
def test_chunked_prompts_equal_whole_prompts(trunk: Engine) -> None:
    """Catches taps in a graph that lose a recurrent layer's state or replace it by another request's."""
    as_alone(trunk.llm, trunk.truth)


@pytest.mark.failure(16, control=True)
def test_comparison_detects_a_lost_state(trunk: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every chunk of a prompt starts from an empty state."""
    for builder in (Mamba2AttentionMetadataBuilder, ShortConvAttentionMetadataBuilder):
        monkeypatch.setattr(builder, "build", _without_states(builder.build))
    with pytest.raises(AssertionError, match="request"):
        as_alone(trunk.llm, trunk.truth)


def _without_states(original: Any) -> Any:
    def build(*args: Any, **kwargs: Any) -> Any:
        metadata = original(*args, **kwargs)
        if metadata.has_initial_states_p is None:
            return metadata
        changes = {"has_initial_states_p": torch.zeros_like(metadata.has_initial_states_p)}
        if hasattr(metadata, "prep_initial_states"):
            changes["prep_initial_states"] = False
        return replace(metadata, **changes)

    return build

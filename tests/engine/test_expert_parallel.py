# SPDX-License-Identifier: Apache-2.0
"""Tests of expert parallelism on two ranks, each with half of the experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import logprobs_of, params, prompt, run
from tests.engine.conftest import opened
from tests.engine.test_parallel import CORES, as_on_one_rank, two_ranks, workload
from tests.tiny import direction, save_tiny_moe
from vllm_steer import Edit

WORKER_EXTENSION = "tests.engine.expert_parallel.ExpertsOfThisRank"
LAYER = 1

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="vLLM's CPU workers want a core each")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def truth(moe: Path) -> list[Any]:
    """Return the outputs of one rank."""
    with opened(moe) as llm:
        return run(llm, *workload())


@pytest.fixture(scope="module")
def llm(truth: list[Any], moe: Path) -> Iterator[Any]:
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "worker_extension_cls": WORKER_EXTENSION}
    with two_ranks(moe, **settings) as engine:
        yield engine


@pytest.mark.feature("expert parallel (on CPU with the kernel's ids repaired)", "steer", "capture")
def test_matches_one_rank(llm: Any, truth: list[Any]) -> None:
    """Catches an edit that each rank adds to its experts' sum, and a capture of one rank's partial sum."""
    as_on_one_rank(run(llm, *workload()), truth)


def test_comparison_finds_an_edit_of_partial_sums(llm: Any) -> None:
    """Negative control: a vector added to each rank's partial sum counts twice."""
    p, vector = prompt(*range(5, 15)), direction(1, 1.0)
    once = run(llm, [p], [params(steering=[Edit(kind="add", point="post_block", layers=LAYER, vector=vector)])])[0]
    found = []
    for added in (vector, vector / 2, None):
        llm.collective_rpc("add_to_partial_sums", args=(LAYER, added))
        found.append(logprobs_of(run(llm, [p], [params(skip_reading_prefix_cache=True)])[0])[0])
    llm.reset_prefix_cache()
    twice, halves, plain = found
    assert np.abs(twice - logprobs_of(once)[0]).max() > 1e-2
    assert np.abs(plain - logprobs_of(once)[0]).max() > 1e-2
    np.testing.assert_allclose(halves, logprobs_of(once)[0], atol=1e-3)

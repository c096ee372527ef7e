# SPDX-License-Identifier: Apache-2.0
"""Models with several residual streams and looped models, split over two or four ranks, against one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.conformance import two_ranks
from tests.conformance.cases import PROMPTS, Case, EditMaker
from tests.conformance.edits import KINDS
from tests.conformance.engine import Answer, generate
from tests.conformance.hf_reference import Trace
from tests.conformance.model import LAYERS, MAX_POSITIONS
from tests.conformance.shard import EVERYTHING
from vllm_steer.models.parallelism import PARALLELISM

CORES = sorted(os.sched_getaffinity(0))[:2]
KINDS_OF_SPLIT = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
STREAM = ("pre_attn", "post_attn", "post_block")
BORDER = LAYERS // 2
TOLERANCE = 1e-3

SPLITS: Final = [
    (tiny, split)
    for row in PARALLELISM
    for split, status in (("tensor", row.tensor), ("pipeline", row.pipeline), ("both", row.both))
    for tiny in two_ranks.ROWS[row.family]
    if status == "proven"
]
ABSENT: Final = [two_ranks.ROWS[row.family][0] for row in PARALLELISM if row.pipeline == "not in vLLM"]

pytestmark = [
    pytest.mark.skipif(len(CORES) < 2, reason="vLLM's CPU workers want a core each"),
    pytest.mark.skipif(not EVERYTHING, reason="takes a minute for each split; CONFORMANCE=all runs them"),
]


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[Any]:
    """Run an engine on a model that this process and its workers know."""
    from vllm_steer import LLM

    llm = LLM(
        model=str(folder), enable_steering=True, enforce_eager=True, dtype="float32", skip_tokenizer_init=True,
        max_model_len=MAX_POSITIONS, max_num_batched_tokens=160, max_num_seqs=64, num_gpu_blocks_override=128,
        max_logprobs=-1, disable_log_stats=True, enable_prefix_caching=False,
        worker_extension_cls="tests.conformance.two_ranks.Worker", **settings,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def cases_of(llm: Any) -> list[Case]:
    """Return plain requests, and edits of every kind at the model's ends and on both sides of the stages' border."""
    plain = generate(llm, [Case("plain", PROMPTS[0])], STREAM, new_tokens=1)[0]
    make = EditMaker(Trace(plain.logprobs, *(plain.streams[point] for point in STREAM)))
    places = [("pre_attn", 0), ("post_attn", BORDER - 1), ("post_block", BORDER - 1), ("pre_attn", BORDER),
              ("post_attn", BORDER), ("post_block", LAYERS - 1)]  # fmt: skip
    return [Case(f"plain {number}", prompt) for number, prompt in enumerate(PROMPTS)] + [
        Case(f"{kind} at {point} of layer {layer}", PROMPTS[(layer + index) % 3], (make.edit(kind, point, layer),))
        for point, layer in places
        for index, kind in enumerate(KINDS)
    ]


def distance(one: Answer, other: Answer) -> float:
    """Return the largest distance of a row or a log-probability."""
    if one.token_ids != other.token_ids:
        return np.inf
    far = float(np.abs(one.logprobs - other.logprobs).max())
    for point in STREAM:
        rows, wanted = one.streams[point], other.streams[point]
        far = max(far, float((np.linalg.norm(rows - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max()))
    return far


def compare(name: str, folder: Path, split: str) -> dict[str, float]:
    """Return the requests that several ranks answer otherwise than one, with their distances."""
    tiny = two_ranks.row(name)
    with pytest.MonkeyPatch.context() as change, two_ranks.prepare(name):
        path, settings = two_ranks.save(tiny, folder)
        with engine(path, **settings) as llm:
            cases = cases_of(llm)
            right = generate(llm, cases, STREAM)
        # With four ranks, two share a core.
        change.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, CORES * (2 if split == "both" else 1))))
        change.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        change.setenv(two_ranks.ROW, name)
        with engine(path, **settings, **KINDS_OF_SPLIT[split]) as llm:
            got = generate(llm, cases, STREAM)
    far = {case.name: distance(*both) for case, *both in zip(cases, got, right, strict=True)}
    return {case: each for case, each in far.items() if not each < TOLERANCE}


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_several_ranks_answer_as_one(name: str, split: str, tmp_path: Path) -> None:
    """Catches streams that are incomplete between stages, edits of partial sums, and edits that run twice or never."""
    assert not compare(name, tmp_path, split)


@pytest.mark.parametrize("name", ABSENT)
def test_vllm_has_no_pipeline_stages(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model that gains pipeline stages, which no test has seen, in a later version of vLLM."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, CORES)))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv(two_ranks.ROW, name)
    with two_ranks.prepare(name):
        path, settings = two_ranks.save(two_ranks.row(name), tmp_path)
        with (
            pytest.raises(NotImplementedError, match="Pipeline parallelism is not supported for this model"),
            engine(path, **settings, **KINDS_OF_SPLIT["pipeline"]),
        ):
            pytest.fail("the engine started")

# SPDX-License-Identifier: Apache-2.0
"""Layers that reduce, add and norm in one function (DeepSeek V3.2, GLM 5), on two tensor-parallel ranks.

The same requests run on one rank, whose taps ``test_identities.py`` proves, and on two ranks: with the fused kernel,
behind which the taps run, and without it, in front of the norm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance import reduced
from tests.conformance.cases import PROMPTS, Case, EditMaker
from tests.conformance.edits import KINDS
from tests.conformance.engine import GPU_SETTINGS, Answer, generate
from tests.conformance.hf_reference import Trace
from tests.conformance.model import LAYERS, MAX_POSITIONS
from tests.conformance.shard import EVERYTHING, selected

CORES = sorted(os.sched_getaffinity(0))[:2]
POINTS = ("pre_attn", "post_attn", "post_block", "mlp_in")
STREAM = POINTS[:3]
TOLERANCE = 1e-3

pytestmark = [
    pytest.mark.skipif(len(CORES) < 2, reason="vLLM's CPU workers want a core each"),
    pytest.mark.skipif(not (EVERYTHING or selected("deepseek_v32")), reason="belongs to another part"),
]


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[Any]:
    """Run an engine in which both the worker and this process know the model."""
    import torch

    from vllm_steer import LLM

    assert not torch.cuda.is_available() or GPU_SETTINGS
    with reduced.prepare():
        llm = LLM(
            model=str(folder), enable_steering=True, enforce_eager=True, dtype="float32", skip_tokenizer_init=True,
            steering_config={"points": ["mlp_in"]}, max_model_len=MAX_POSITIONS, max_num_batched_tokens=160,
            max_num_seqs=64, num_gpu_blocks_override=128, max_logprobs=-1, disable_log_stats=True,
            enable_prefix_caching=False, worker_extension_cls="tests.conformance.reduced.Worker", **settings,
        )  # fmt: skip
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


@contextmanager
def two_ranks(folder: Path, **environment: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as change:
        change.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, CORES)))
        change.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        for name, value in environment.items():
            change.setenv(name, value)
        with engine(folder, tensor_parallel_size=2) as llm:
            yield llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reduced.save_checkpoint(tmp_path_factory.mktemp("reduced") / "model")


@pytest.fixture(scope="module")
def truth(folder: Path) -> tuple[list[Case], list[Answer]]:
    """Return the requests and their answers on one rank."""
    with engine(folder) as llm:
        plain = generate(llm, [Case("plain", PROMPTS[0])], POINTS, new_tokens=1)[0]
        trace = Trace(plain.logprobs, *(plain.streams[point] for point in STREAM), mlp_in=plain.streams["mlp_in"])
        make = EditMaker(trace)
        cases = [Case(f"plain {number}", prompt) for number, prompt in enumerate(PROMPTS)]
        places = [("pre_attn", 0), ("post_block", LAYERS - 1), *((point, 2) for point in POINTS)]
        cases += [
            Case(f"{kind} at {point} of layer {layer}", PROMPTS[(layer + index) % 3], (make.edit(kind, point, layer),))
            for point, layer in places
            for index, kind in enumerate(KINDS)
        ]
        return cases, generate(llm, cases, POINTS)


def distances(got: list[Answer], right: list[Answer]) -> list[float]:
    """Return, for each request, the largest distance of a row or a log-probability."""
    found = []
    for one, other in zip(got, right, strict=True):
        same = one.token_ids == other.token_ids
        far = float(np.abs(one.logprobs - other.logprobs).max()) if same else np.inf
        for point in POINTS if same else ():
            rows, wanted = one.streams[point], other.streams[point]
            far = max(far, float((np.linalg.norm(rows - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max()))
        found.append(far)
    return found


@pytest.mark.parametrize("kernel", ["kernel", "steps"])
def test_two_ranks_answer_as_one(kernel: str, folder: Path, truth: tuple[list[Case], list[Answer]]) -> None:
    """Catches taps on a partial sum, taps that the kernel bypasses, and taps that run twice when it does not."""
    cases, right = truth
    with two_ranks(folder, **{reduced.KERNEL: kernel}) as llm:
        got = generate(llm, cases, POINTS)
        calls = llm.collective_rpc("kernel_calls")
        refused = llm.collective_rpc("steering_capabilities")[0]["refused"]
    wrong = {case.name: far for case, far in zip(cases, distances(got, right), strict=True) if not far < TOLERANCE}
    assert not wrong
    assert all(calls) if kernel == "kernel" else not any(calls)
    assert all("no rank holds this branch" in reason for reason in refused["attn_out"].values())
    assert len(refused["attn_out"]) == LAYERS


def test_the_check_at_start_rejects_taps_that_the_kernel_bypasses(folder: Path) -> None:
    """Catches an engine that starts although its taps do not run behind the kernel."""
    with (
        pytest.raises(
            RuntimeError, match="self-check of its taps failed at post_attn of layer 0: no finite row was stored"
        ),
        two_ranks(folder, **{reduced.KERNEL: "kernel", reduced.UNJOINED: "1"}),
    ):
        pytest.fail("the engine started")

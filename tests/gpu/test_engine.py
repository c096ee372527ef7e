# SPDX-License-Identifier: Apache-2.0
"""GPU: under both runners, with CUDA graphs and eager, requests of a mixed batch are steered as they are alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.runner import V1, V2, choose_runner, runner_of
from tests.tiny import direction, save_tiny_llama
from vllm_steer import LLM, Edit, SamplingParams

pytestmark = pytest.mark.gpu

HIDDEN, VOCAB, KINDS = 256, 512, ("add", "add_normed", "ablate", "clamp")
LARGE = 20
"""Number of requests whose prompts fill a step of 513 to 1,024 tokens."""
VARIANTS = {
    "v2-graphs": {"enforce_eager": False},
    "v2-eager": {"enforce_eager": True},
    "v1-graphs": {"enforce_eager": False, "runner": "0"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny_llama(
        folder, hidden_size=HIDDEN, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        vocab_size=VOCAB, initializer_range=0.08,
    )  # fmt: skip


def requests(count: int = 48) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Return requests: a third is plain, the others have programs of all kinds, points, layers and selectors."""
    rng = np.random.default_rng(0)
    prompts, params = [], []
    for i in range(count):
        prompts.append({"prompt_token_ids": rng.integers(1, VOCAB, int(rng.integers(3, 90))).tolist()})
        edits = []
        for j in range(0 if i % 3 == 0 else 1 + i % 2):
            kind = KINDS[(i + j) % 4]
            edits.append(
                Edit(
                    kind=kind,
                    point=("pre_attn", "post_attn", "post_block")[(i // 3 + j) % 3],
                    layers=[int(rng.integers(4))],
                    vector=direction(100 * i + j, 1.0, HIDDEN),
                    strength=1.0 if kind != "add_normed" else 0.7,
                    tokens=("all", "prompt", "generated", "last_prompt", [0, -2, (5, 9)])[i % 5 if i % 5 < 4 else 0],
                    **({"low": 1.0} if kind == "clamp" else {}),
                )
            )
        params.append(
            SamplingParams(max_tokens=24, temperature=0, logprobs=1, detokenize=False, steering=edits or None)
        )
    return prompts, params


def answers(llm: LLM, prompts: Any, params: Any) -> list[tuple[list[int], list[float]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (list(o.outputs[0].token_ids), [next(iter(step.values())).logprob for step in o.outputs[0].logprobs])
        for o in outputs
    ]


def agreement(ours: Any, theirs: Any, tolerance: float) -> float:
    """Return the share of requests whose first log-probability agrees.

    Greedy text diverges at the first near-tie in bf16, so later tokens are not compared.
    """
    return float(np.mean([abs(a[1][0] - b[1][0]) < tolerance for a, b in zip(ours, theirs, strict=True)]))


def agree_until_a_tie(ours: Any, theirs: Any, tolerance: float) -> bool:
    """Return whether two texts have equal log-probabilities up to the first token that differs, that one included.

    Near a tie, the most probable tokens of both have about the same log-probability.
    """
    for token, a, other, b in zip(*ours, *theirs, strict=True):
        if abs(a - b) >= tolerance:
            return False
        if token != other:
            break
    return True


@contextmanager
def recorded_sizes(llm: LLM) -> Iterator[list[tuple[int, str]]]:
    """Record the size and the kind of graph that runner V2 chooses for each step."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    manager = getattr(runner, "cudagraph_manager", None)  # runner V1 has none
    sizes: list[tuple[int, str]] = []
    dispatch = getattr(manager, "dispatch", None)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        batch = dispatch(*args, **kwargs)
        sizes.append((batch.num_tokens, batch.cg_mode.name))
        return batch

    with pytest.MonkeyPatch.context() as patch:
        if dispatch is not None:
            patch.setattr(manager, "dispatch", recorded)
        yield sizes


@pytest.fixture(scope="module")
def results(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    prompts, params = requests()
    plain = [SamplingParams(max_tokens=24, temperature=0, logprobs=1, detokenize=False) for _ in params]
    for name, settings in VARIANTS.items():
        settings = dict(settings)
        with pytest.MonkeyPatch.context() as patch:
            choose_runner(patch, settings.pop("runner", "1"))
            llm = LLM(
                model=str(model), enable_steering=True, dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True,
                gpu_memory_utilization=0.02, kv_cache_memory_bytes=1 << 30, max_num_seqs=256, **settings,
            )  # fmt: skip
        found[name] = answers(llm, prompts, params)
        found[name + "-alone"] = [answers(llm, p, s)[0] for p, s in zip(prompts[:12], params[:12], strict=True)]
        found[name + "-plain"] = answers(llm, prompts, plain)
        llm.reset_prefix_cache()
        with recorded_sizes(llm) as sizes:
            found[name + "-large"] = answers(llm, prompts[:LARGE], params[:LARGE])
        found[name + "-sizes"] = sizes
        found[name + "-runner"] = runner_of(llm)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    return found


def test_variants_use_their_runner(results: dict[str, Any]) -> None:
    """Catches a comparison of one runner with itself."""
    assert [results[f"{name}-runner"] for name in VARIANTS] == [V2, V2, V1]


@pytest.mark.parametrize("name", ["v2-eager", "v1-graphs"])
@pytest.mark.feature("CUDA graphs, both runners, async scheduling (GPU)", "steer")
def test_graphs_and_runners_agree(results: dict[str, Any], name: str) -> None:
    """Catches taps that a graph froze or lost, and rows that one runner assigns differently."""
    assert agreement(results["v2-graphs"], results[name], 0.15) >= 0.97


def test_large_steps_replay_graphs(results: dict[str, Any]) -> None:
    """Catches steered steps beyond vLLM's largest graph that launch from Python, and wrong rows in their graphs."""
    assert results["v2-graphs-sizes"][0][1] == "PIECEWISE"
    assert 512 < results["v2-graphs-sizes"][0][0] <= 1024
    assert agreement(results["v2-graphs-large"], results["v2-eager-large"], 0.15) >= 0.95
    assert agreement(results["v2-graphs-large"], results["v2-graphs-plain"][:LARGE], 0.15) <= 0.8, "negative control"


@pytest.mark.parametrize("name", list(VARIANTS))
def test_each_request_is_steered_as_it_is_alone(results: dict[str, Any], name: str) -> None:
    """Catches the row of a neighbour."""
    assert agreement(results[name][:12], results[name + "-alone"], 0.15) >= 0.9


@pytest.mark.parametrize("name", list(VARIANTS))
def test_steered_requests_differ_and_plain_ones_do_not(results: dict[str, Any], name: str) -> None:
    """Catches edits without effect, and edits that leak to plain neighbours.

    With plain code, the batch without edits runs other kernels, which round differently.
    """
    steered, plain = results[name], results[name + "-plain"]
    alike = [agree_until_a_tie(a, b, 0.15) for a, b in zip(steered, plain, strict=True)]
    assert np.mean(alike[::3]) >= 0.9, "plain neighbours"
    same = [a[0] == b[0] for a, b in zip(steered, plain, strict=True)]
    assert np.mean([s for i, s in enumerate(same) if i % 3]) <= 0.3, "steered requests"

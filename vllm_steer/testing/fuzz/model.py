# SPDX-License-Identifier: Apache-2.0
"""The engines that are compared: under test, as reference, and stock; and the model for where none is named."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vllm_steer.points import POINT_NAMES, points_on
from vllm_steer.testing.fuzz.draw import MAX_MODEL_LEN, Facts
from vllm_steer.testing.fuzz.workload import Settings

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


def save_tiny_llama(folder: Path, **overrides: Any) -> Path:
    """Save a Llama of 4 layers with random float32 weights, large enough that every sublayer matters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).float().save_pretrained(folder)
    return folder


ON_A_GPU: Mapping[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
"""Enough for what is asked, and nothing measured: others may use the same GPU."""


def prepare_environment() -> None:
    """To be called before vLLM is imported: engines run in this process, where they can be looked into."""
    os.environ[IN_PROCESS] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@contextmanager
def engine(model: str, dtype: str, settings: Settings, *, steering: bool = True) -> Iterator[Any]:
    """An ``LLM`` with these settings, closed at the end so that the next one can start in the same process."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    from vllm_steer.llm import LLM

    ours: dict[str, Any] = {"enable_steering": True, "steering_config": settings.steering} if steering else {}
    given = {
        "dtype": dtype, "max_model_len": MAX_MODEL_LEN, "skip_tokenizer_init": True, "disable_log_stats": True,
        "use_tqdm_on_load": False, "seed": 0, "enforce_eager": True,
        **(ON_A_GPU if current_platform.is_cuda() else {"gpu_memory_utilization": 0.6}), **settings.engine, **ours,
    }  # fmt: skip
    llm = LLM(model=model, **given)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def alone(points: Sequence[str] = ()) -> Settings:
    """The simplest engine: one request at a time, each prompt in one step, eager, nothing cached.

    ``points``: those that it has beside the ones on the stream.
    """
    return Settings(
        engine={
            "enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 1,
            "max_num_batched_tokens": 2048, "async_scheduling": False,
        },
        steering={"capture_rows": 16384, **with_points(points)},
    )  # fmt: skip


def with_points(points: Sequence[str]) -> dict[str, Any]:
    """The setting for engines that have these points beside those on the stream."""
    return {"points": list(points)} if points else {}


def facts_of(llm: Any) -> Facts:
    """What workloads have to know of this engine's model, measured on one prompt."""
    from vllm.platforms import current_platform

    from vllm_steer.frontend.context import engine_context
    from vllm_steer.params import SamplingParams

    served = engine_context(llm.llm_engine)
    if served is None:
        raise ValueError("the engine was started without steering")
    capabilities = served.capabilities
    on = points_on(capabilities.config.points)
    points = tuple(point for point in on if not capabilities.refused.get(point))
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompt = np.random.default_rng(0).integers(1, vocab, 32).tolist()
    capture = {"memory": {"hooks": dict.fromkeys(points, "all"), "positions": "all"}}
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, capture=capture)
    result = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].capture_results["memory"]
    lengths = {site: float(result.tensor(*site).float().norm(dim=1).median()) for site in result.sites}
    return Facts(
        hidden=capabilities.hidden_size,
        layers=capabilities.num_layers,
        vocab=vocab,
        scale=tuple(lengths.get((p, layer), 1.0) for layer in range(capabilities.num_layers) for p in POINT_NAMES),
        served=points,
        cuda=current_platform.is_cuda_alike(),
    )

# SPDX-License-Identifier: Apache-2.0
"""Engines for the fuzzer (under test, reference, stock) and its default model."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_steer.points import POINT_NAMES, points_on
from vllm_steer.testing.fuzz.draw import MAX_MODEL_LEN
from vllm_steer.testing.fuzz.workload import NUM_FEATURES, SAE, ModelFacts, Settings
from vllm_steer.testing.heap import cheap_collections

_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


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


_CUDA_ARGUMENTS: Mapping[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
"""Small fixed sizes, so that vLLM does not profile a GPU that other processes use too."""


def prepare_environment() -> None:
    """Set the environment for in-process engines. Call before vLLM is imported."""
    os.environ[_MULTIPROCESSING] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Triton multiplies float32 in TF32 by default: attention of two batch shapes then differs by 0.25 % of a row, more
    # than the tolerance for float32. Models in bfloat16 are not affected.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


@cache
def _save_autoencoder(model: str) -> str:
    """Save a random ReLU autoencoder for the model, for as long as the process runs, and return its folder.

    A threshold above 0 would make features of equal rows differ by rounding.
    """
    from transformers import AutoConfig

    hidden = AutoConfig.from_pretrained(model).get_text_config().hidden_size
    random = np.random.default_rng(7)
    arrays = {
        "W_enc": random.standard_normal((hidden, NUM_FEATURES)) / hidden**0.5,
        "W_dec": random.standard_normal((NUM_FEATURES, hidden)) / hidden**0.5,
        "b_enc": np.zeros(NUM_FEATURES),
        "b_dec": np.zeros(hidden),
        "threshold": np.zeros(NUM_FEATURES),
    }
    folder = tempfile.mkdtemp(prefix="vllm-steer-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    np.savez(Path(folder) / "params.npz", **{name: array.astype(np.float32) for name, array in arrays.items()})
    return folder


@contextmanager
def engine(model: str, dtype: str, settings: Settings, *, steering: bool = True) -> Iterator[Any]:
    """Start an ``LLM`` with these settings and shut it down on exit, so that the next one can start in this process."""
    from vllm_steer.compat.internals import cleanup_dist_env_and_memory, current_platform
    from vllm_steer.llm import LLM

    steering_args: dict[str, Any] = {}
    if steering:
        config = {"saes": {SAE: _save_autoencoder(model)}, **settings.steering}
        steering_args = {"enable_steering": True, "steering_config": config}
    given = {
        "dtype": dtype, "max_model_len": MAX_MODEL_LEN, "skip_tokenizer_init": True, "disable_log_stats": True,
        "use_tqdm_on_load": False, "seed": 0, "enforce_eager": True,
        **(_CUDA_ARGUMENTS if current_platform.is_cuda() else {"gpu_memory_utilization": 0.6}),
        **settings.engine, **steering_args,
    }  # fmt: skip
    with cheap_collections():
        llm = LLM(model=model, **given)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


def reference_settings(points: Sequence[str] = ()) -> Settings:
    """Return the settings of the reference engine: one request at a time, each prompt in one step, eager, no cache.

    Args:
        points: Hook points on the branches to enable in addition to those on the residual stream.
    """
    return Settings(
        engine={
            "enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 1,
            "max_num_batched_tokens": 2048, "async_scheduling": False,
        },
        steering={"capture_rows": 16384, **with_points(points)},
    )  # fmt: skip


def with_points(points: Sequence[str]) -> dict[str, Any]:
    """Return the steering setting that enables these hook points on the branches."""
    return {"points": list(points)} if points else {}


def facts_of(llm: Any) -> ModelFacts:
    """Return the facts that workloads need about this engine's model; row lengths are measured on one prompt.

    Raises:
        ValueError: The engine was started without steering.
    """
    from vllm_steer.compat.internals import current_platform
    from vllm_steer.frontend.context import engine_context
    from vllm_steer.params import SamplingParams

    context = engine_context(llm.llm_engine)
    if context is None:
        raise ValueError("the engine was started without steering")
    capabilities = context.capabilities
    on = points_on(capabilities.config.points)
    points = tuple(point for point in on if not capabilities.refused.get(point))
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompt = np.random.default_rng(0).integers(1, vocab, 32).tolist()
    capture = {"memory": {"hooks": dict.fromkeys(points, "all"), "positions": "all"}}
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, capture=capture)
    result = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].capture_results["memory"]
    lengths = {site: float(result.tensor(*site).float().norm(dim=1).median()) for site in result.sites}
    return ModelFacts(
        hidden=capabilities.hidden_size,
        layers=capabilities.num_layers,
        vocab=vocab,
        scale=tuple(lengths.get((p, layer), 1.0) for layer in range(capabilities.num_layers) for p in POINT_NAMES),
        points=points,
        cuda=current_platform.is_cuda_alike(),
    )

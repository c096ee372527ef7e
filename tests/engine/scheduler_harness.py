# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with steering but without an engine; the model output of each step is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_steer import SamplingParams, engine_kwargs
from vllm_steer.capture.step_rows import StepRows
from vllm_steer.engine.model_output import ROWS_ATTRIBUTE
from vllm_steer.engine.scheduler import make_scheduler

BLOCK, MAX_LEN = 16, 128


def config(folder: Path, *, sequences: int, speculative_config: Any = None, **steering: Any) -> Any:
    """Return the configuration of an engine for ``sequences`` requests; ``steering`` sets the steering limits."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(folder), dtype="float32", max_model_len=MAX_LEN, max_num_seqs=sequences, block_size=BLOCK,
        max_num_batched_tokens=48, enforce_eager=True, skip_tokenizer_init=True,
        speculative_config=speculative_config, **engine_kwargs(steering),
    )  # fmt: skip
    return arguments.create_engine_config()


def make(vllm_config: Any, blocks: int, window: int | None = None, non_causal: bool = False, **settings: Any) -> Any:
    """Return a new scheduler with ``blocks`` KV blocks of 16 tokens.

    ``window`` is the attention window; ``non_causal`` is whether each token of a prompt attends to all of them.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    vllm_config.cache_config.num_gpu_blocks = blocks
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    spec: Any = FullAttentionSpec(**shape, non_causal=non_causal)
    if window is not None:
        spec = SlidingWindowSpec(**shape, sliding_window=window)
    return make_scheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK,
        **settings,
    )


def request(name: str, prompt: list[int], max_tokens: int, **fields: Any) -> Any:
    """Return an engine request as the scheduler receives it."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)
    return Request(name, prompt, params, None, block_hasher=get_request_block_hasher(BLOCK, hash_fn))


def image_item(offset: int, length: int, modality: str = "image") -> Any:
    """Return a multimodal item at these positions, as requests have it."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=offset, length=length)
    name = f"i{offset}"
    return MultiModalFeatureSpec(data=None, modality=modality, identifier=name, mm_position=place, mm_hash=name)


def finish_step(scheduler: Any, scheduled: Any, rows: tuple[StepRows, ...] = ()) -> list[Any]:
    """Give the scheduler the output of a scheduled step and return the request outputs; see :func:`model_output`."""
    outputs = scheduler.update_from_output(scheduled, model_output(scheduler, scheduled, rows))
    return [output for client in outputs.values() for output in client.outputs]


def finish(scheduler: Any) -> None:
    """Run all requests to their end."""
    while scheduler.has_unfinished_requests():
        finish_step(scheduler, scheduler.schedule())


def model_output(scheduler: Any, scheduled: Any, rows: tuple[StepRows, ...] = ()) -> Any:
    """Return a worker's output for a scheduled step that samples token 1 for every request and captures ``rows``."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(scheduled.num_scheduled_tokens)
    whole = [scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_tokens for name in names]
    sampled = [[1] if each else [] for each in whole]
    made = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
    setattr(made, ROWS_ATTRIBUTE, rows)
    return made

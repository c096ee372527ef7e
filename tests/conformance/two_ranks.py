# SPDX-License-Identifier: Apache-2.0
"""Models with several residual streams and looped models, on one rank and on two.

The layers and the loop over them are vLLM's; ``stand_ins.py`` replaces what needs a GPU. Every rank computes the whole
random weight of a parameter from the parameter's name, and vLLM's own weight loaders take the rank's part. Importing
:class:`Worker` in a worker prepares the process.
"""

from __future__ import annotations

import copyreg
import os
import zlib
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn

from tests.conformance.model import LAYERS, NORM_SPREAD, WEIGHT_STD, TinyModel, build

ROW: Final = "TWO_RANKS_ROW"
"""Environment variable: the row whose model the process runs."""
ROWS: Final[dict[str, tuple[str, ...]]] = {
    "DeepSeek V4": ("deepseek_v4", "deepseek_v4_cpu"),
    "DeepSeek V4.1": ("deepseek_v41", "deepseek_v41_engram"),
    "GLM 5 Next": ("glm5_next",),
    "HY V4": ("hy_v4",),
    "Qwen 4 (Exp)": ("qwen4_exp",),
    "Gemma 3n": ("gemma3n",),
    "Kimi K3": ("kimi_k3",),
    "HRM-Text": ("hrmtext",),
    "IQuest-LoopCoder": ("iquestloopcoder",),
}
"""Rows of each family of ``models/parallelism.py``."""
_SETTINGS: Final[dict[str, Any]] = {
    # Each of vLLM's ranks cuts small activations by the statistics of its own part, so two ranks compute another model.
    "gemma3n": {"activation_sparsity_pattern": [0.0] * LAYERS},
}


def row(name: str) -> TinyModel:
    """Return a row of the zoo, with or without a counterpart in HF Transformers."""
    from tests.conformance.no_reference import NO_REFERENCE
    from tests.conformance.zoo import ZOO

    found = next(tiny for tiny in (*NO_REFERENCE, *ZOO) if tiny.name == name)
    return replace(found, settings={**found.settings, **_SETTINGS.get(name, {})})


def save(tiny: TinyModel, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Save the model, or only its config if every rank makes the weights; return the engine settings to load it."""
    from tests.conformance.no_reference import save_config

    if not tiny.is_known_to_hf:
        return save_config(tiny, folder), {"load_format": "dummy", **(tiny.engine or {})}
    model: Any = build(tiny)
    model.save_pretrained(folder / tiny.name)
    return folder / tiny.name, {}


def prepare(name: str) -> ExitStack:
    """Make vLLM run the row's model in this process, with weights by name."""
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from tests.conformance.kernels import cpu_kernels, media_stubs
    from tests.conformance.no_reference import register_config
    from vllm_steer.compat.wraps import load

    tiny = row(name)
    stack = ExitStack()
    if not tiny.is_known_to_hf and (config := register_config(tiny.config)) is not None:
        copyreg.pickle(config, _reduce_config)
    if tiny.model_class is not None:
        with media_stubs():
            ModelRegistry.register_model(str(tiny.architecture), load(tiny.model_class))
        stack.enter_context(cpu_kernels(tiny.model_class))
    stack.enter_context(patch.object(DummyModelLoader, "load_weights", load_by_name))
    return stack


def _reduce_config(config: Any) -> Any:
    """Pickle a config whose class exists only in this process."""
    return _make_config, (type(config).model_type, vars(config))


def _make_config(model_type: str, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    from tests.conformance.no_reference import register_config

    register_config(model_type)
    config = AutoConfig.for_model(model_type)
    vars(config).update(fields)
    return config


@torch.no_grad()
def load_by_name(loader: Any, model: nn.Module, model_config: Any) -> None:
    """Fill all parameters and buffers with numbers that depend on the name only."""
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for suffix, tensor in own:
            if tensor.is_floating_point() and suffix not in module._non_persistent_buffers_set:
                _fill(f"{name}.{suffix}", module, suffix, tensor)


def _fill(name: str, module: Any, suffix: str, tensor: torch.Tensor) -> None:
    shape = _whole_shape(module, suffix, tensor)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    whole = WEIGHT_STD * noise if len(shape) > 1 else 1.0 + NORM_SPREAD * noise.clamp(-1.0, 1.0)
    whole = whole.bfloat16().to(tensor.dtype)
    if whole.shape == tensor.shape:
        tensor.copy_(whole)
    else:
        load: Any = getattr(tensor, "weight_loader", getattr(module, "weight_loader", None))
        load(tensor, whole)


def _whole_shape(module: Any, suffix: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter on one rank.

    Raises:
        TypeError: The parameter is of no known kind although the model is split.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if type(module).__name__ == "ParallelEngramEmbedding":
        # One rank too keeps only the rows of its heads.
        return module.num_embeddings, *tensor.shape[1:]
    if get_tensor_model_parallel_world_size() == 1 and not isinstance(module, VocabParallelEmbedding):
        return tuple(tensor.shape)
    if isinstance(module, VocabParallelEmbedding):
        return module.org_vocab_size, module.embedding_dim
    if isinstance(module, ColumnParallelLinear):
        return (module.output_size, *tensor.shape[1:])
    if isinstance(module, RowParallelLinear):
        return (module.output_size, module.input_size)[: tensor.dim()]
    if suffix.startswith(("w13", "w2")):
        raise TypeError(f"{type(module).__name__}.{suffix}: experts are not split here")
    return tuple(tensor.shape)


class Worker:
    """Extension of vLLM's worker."""

    prepared = prepare(os.environ[ROW]) if os.environ.get(ROW) else None

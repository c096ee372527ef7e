# SPDX-License-Identifier: Apache-2.0
"""Tiny models: real architectures, shrunk, with random weights, built from HF's own classes.

Four layers of width 64. The weights are large enough for each sublayer to matter: with HF's own initialisation
(std 0.02) the blocks hardly change the stream, and an edit one sublayer too late would look like one in time.
"""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from tests.conformance.processors import save_processor

HIDDEN: Final = 64
LAYERS: Final = 4
VOCAB: Final = 128
MAX_POSITIONS: Final = 64
WEIGHT_STD: Final = 0.2
NORM_SPREAD: Final = 0.3
MAX_PARAMETERS: Final = 20_000_000
"""Limit that catches a row which was not shrunk enough before it fills the memory."""

SHRUNK: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    # Heads of 32: the smallest that vLLM's CPU attention supports.
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
"""Settings of every config class that has them; rows state only their exceptions."""


TOWER: Final[Mapping[str, Any]] = {
    "depth": 2,
    "embed_dim": HIDDEN,
    "num_heads": 4,
    "out_hidden_size": HIDDEN,
    "hidden_dim": HIDDEN,
    "num_layers": 2,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "d_model": HIDDEN,
    "encoder_hidden_size": HIDDEN,
}
"""The same for the configs of towers, which only have to be small: no image or sound reaches them."""

DEFAULT: Final = object()
"""In a row's settings: the default of the config class."""


@dataclass(frozen=True)
class Part:
    """A config inside a wrapper's config: the name of its class and its arguments besides ``SHRUNK``."""

    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TinyModel:
    """One row: how to build an architecture, where its blocks are in HF and in vLLM, and what the engine must serve.

    ``config`` is the name of the HF config class and ``settings`` its arguments besides ``SHRUNK`` (``DEFAULT``: the
    default of the class); ``layer`` is the decoder-layer class that vLLM runs (several: joined by ``+``) and ``recipe``
    its family. ``refused`` names the points that must refuse edits, ``unread`` those that must refuse reads. The
    settings of a wrapper have a `Part` for its language model; its towers are shrunk without being named.

    HF: ``blocks`` is the path to the list of blocks, ``branch`` the module in a block whose output is the attention
    branch as it is added to the stream (times ``multiplier``, a number or a field of the config), and ``reads_mid`` the
    module whose input is the stream between attention and MLP (None: no such module). ``a|b`` is the first that the
    block has, ``a+b`` both in their order of computation. ``one_branch``: each block has only a mixer or, at the
    numbers ``mlp_blocks``, only an MLP. ``attention`` names HF's attention implementation if its default is another.
    ``as_in_vllm`` names what vLLM computes differently from HF; the reference follows vLLM there (``hf_reference.py``).

    vLLM: ``since`` is the first version with the layer class, if not all have it, ``architecture`` its name if it is
    not the HF class's, ``model_class`` the class of another platform than this one (``module:name``; ``stand_ins.py``
    replaces its mixers), ``engine`` holds engine settings for this row, and ``branch_in_vllm`` names its attention
    branch. ``no_parity`` is the reason why a model that HF has is proven inside vLLM instead. ``gpu_only``: its kernels
    do not exist on a CPU. ``pass_argument`` is the argument of a layer's ``forward`` that tells the runs of a layer
    apart, in models that run their layers several times. ``cross`` names the attention to an encoder between attention
    and MLP. ``gaps`` are the layers that do not read what the layer before them leaves, ``forks`` those in front of
    which the stream is copied for a later layer.
    """

    name: str
    config: str
    settings: Mapping[str, Any]
    recipe: str
    layer: str
    blocks: str = "model.layers"
    branch: str = "self_attn"
    reads_mid: str | None = "post_attention_layernorm"
    multiplier: str | float | None = None
    refused: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    attention: str | None = None
    architecture: str | None = None
    model_class: str | None = None
    auto: str = "AutoModelForCausalLM"
    engine: Mapping[str, Any] | None = None
    as_in_vllm: str | None = None
    no_parity: str | None = None
    dtype: str = "float32"
    since: str = ""
    branch_in_vllm: str | None = None
    gpu_only: bool = False
    pass_argument: str | None = None
    cross: str | None = None
    gaps: tuple[int, ...] = ()
    forks: tuple[int, ...] = ()
    one_branch: bool = False
    mlp_blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def is_known_to_hf(self) -> bool:
        """Whether ``config`` names an HF config class; otherwise it is the model type in a plain config."""
        return self.config.endswith("Config")

    @property
    def layers(self) -> set[str]:
        """The decoder-layer classes."""
        return set(self.layer.split("+"))


def config_of(tiny: TinyModel) -> PretrainedConfig:
    """Return the HF config of a row, with special tokens inside the small vocabulary."""
    return _config(getattr(transformers, tiny.config), tiny.settings, SHRUNK)


def _config(cls: type[PretrainedConfig], own: Mapping[str, Any], shrunk: Mapping[str, Any]) -> PretrainedConfig:
    known = set(inspect.signature(cls.__init__).parameters) | {"bos_token_id", "eos_token_id", "pad_token_id"}
    small = {name: value for name, value in shrunk.items() if name in known}
    if "head_dim" not in small and "v_head_dim" not in small:
        small |= {name: small[name] // 2 for name in ("num_attention_heads", "num_key_value_heads") if name in small}
    if "n_positions" in own:
        small.pop("max_position_embeddings", None)
    towers = {
        name: _config(part, {}, {**SHRUNK, **TOWER}).to_dict()
        for name, part in cls.sub_configs.items()
        if name not in own and getattr(part, "model_type", "")
    }
    parts = {
        name: _config(getattr(transformers, part.config), part.settings, {**SHRUNK, **TOWER}).to_dict()
        for name, part in own.items()
        if isinstance(part, Part)
    }
    settings = {**small, **towers, **own, **parts}
    return cls(**{name: value for name, value in settings.items() if value is not DEFAULT})


def build(tiny: TinyModel) -> PreTrainedModel:
    """Return the row's model in float32 with seeded random weights, in evaluation mode."""
    seed = zlib.crc32(tiny.name.encode())
    config, factory = config_of(tiny), getattr(transformers, tiny.auto)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in factory.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{tiny}: {size} parameters; shrink it further")
    torch.manual_seed(seed)
    model: PreTrainedModel = factory.from_config(config, dtype=torch.float32, attn_implementation=tiny.attention)
    _randomise(model, torch.Generator().manual_seed(seed))
    return model.eval()


def save(tiny: TinyModel, folder: Path) -> Path:
    """Save the row's model (config.json and safetensors) under ``folder`` unless it is there, and return its path."""
    path = folder / tiny.name
    if not (path / "config.json").exists():
        build(tiny).save_pretrained(path)
        save_processor(tiny.config, path)
        if tiny.architecture is not None:
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**config, "architectures": [tiny.architecture]}))
    return path


@torch.no_grad()
def _randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            # vLLM's CPU router ignores it if the scores are a softmax.
            weight.zero_()
        elif weight.ndim > 1 or name.endswith("bias"):
            weight.copy_(WEIGHT_STD * noise)
        else:
            # Norms, around their neutral value: 1 in most models, 0 in models that multiply by 1 + weight.
            weight.add_(NORM_SPREAD * noise.clamp(-1.0, 1.0))
        # Rounded as in real checkpoints: some layers keep a weight in bfloat16 whatever the model's dtype.
        weight.copy_(weight.bfloat16())

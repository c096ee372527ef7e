# SPDX-License-Identifier: Apache-2.0
"""First half of a proof: build the shrunk model in HF Transformers and record its streams, plain and edited.

``python -m vllm_steer.testing.prove.reference CONFIG_FOLDER OUT`` writes the model and ``streams.npz`` to OUT. It runs
in a process without vLLM, whose Transformers backend changes HF's classes in place.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

LAYERS = 4
VOCAB = 128
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_WIDTHS = (
    "intermediate_size",
    "ffn_hidden_size",
    "ffn_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "expert_ffn_hidden_size",
)
_WIDTH = 128
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_GROUPS = ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")
_MINIMA = {**dict.fromkeys(_EXPERTS, 4), **dict.fromkeys(_CHOSEN, 2), **dict.fromkeys(_GROUPS, 1)}


def shrink(config: Any) -> None:
    """Shrink an HF text configuration in place to a few narrow layers that still include each kind of layer.

    Only sizes with a known meaning change. The head size, positions, norms, multipliers and layer patterns stay, and so
    does the ratio of hidden size and heads.

    Raises:
        ValueError: The configuration has no number of layers, hidden size or number of heads.
    """
    try:
        layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    except AttributeError as error:
        raise ValueError(f"the configuration cannot be shrunk: {error}") from None
    head = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = next((value for name in _KV_HEADS if (value := getattr(config, name, None))), heads)
    group = max(1, heads // kv_heads)
    few = 2 if group == 1 else 4
    _shorten(config, layers)
    config.hidden_size = few * head
    config.num_attention_heads = few
    for name in _KV_HEADS:
        _set(config, name, max(1, few // min(group, few)))
    for name in _WIDTHS:
        if isinstance(getattr(config, name, None), int):
            _set(config, name, _WIDTH)
    for name, least in _MINIMA.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > least:
            _set(config, name, least)
    config.vocab_size = VOCAB
    for name in _TOKENS:
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    for name in ("word_embed_proj_dim", "hidden_size_per_layer_input"):
        if isinstance(getattr(config, name, None), int):
            _set(config, name, config.hidden_size)
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def choose_layers(kinds: list[Any], count: int = LAYERS) -> list[int]:
    """Return the layers to keep, ascending: the first of each kind, then the first of the others."""
    first = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    rest = [index for index in range(len(kinds)) if index not in first]
    return sorted((first + rest)[:count])


def _shorten(config: Any, layers: int) -> None:
    """Keep a few layers, and their entries in every list that has one entry per layer."""
    lists = {
        name: value for name, value in vars(config).items() if isinstance(value, (list, tuple)) and len(value) == layers
    }
    kept = choose_layers([repr(kinds) for kinds in zip(*lists.values(), strict=True)] or [""] * layers)
    config.num_hidden_layers = len(kept)
    for name, value in lists.items():
        setattr(config, name, [value[index] for index in kept])


def _set(config: Any, name: str, value: int) -> None:
    if hasattr(config, name):
        setattr(config, name, value)


STREAMS = "streams.npz"
EDITED_LAYER = 1
PROMPT_LEN = 12
_WEIGHT_STD, _NORM_SPREAD = 0.2, 0.3


def prompt() -> list[int]:
    """Return the tokens of the request."""
    return [int(token) for token in np.random.default_rng(7).integers(3, VOCAB, PROMPT_LEN)]


def make(source: str, out: Path, trust_remote_code: bool = False) -> None:
    """Write the shrunk model and its streams; raises HF's error if it does not know the model."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    shrink(config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
    ).eval()
    randomise(model)
    model.save_pretrained(out)
    plain = _streams(model, None)
    length = float(np.linalg.norm(plain[EDITED_LAYER + 1], axis=-1).mean())
    vector = np.random.default_rng(3).standard_normal(config.hidden_size).astype(np.float32)
    vector *= length / np.linalg.norm(vector)
    np.savez(out / STREAMS, plain=plain, edited=_streams(model, vector), vector=vector)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Set weights large enough for every sublayer to matter, and norms around their neutral value."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        if weight.ndim > 1 or name.endswith("bias"):
            weight.copy_(_WEIGHT_STD * noise)
        else:
            weight.add_(_NORM_SPREAD * noise.clamp(-1.0, 1.0))


@torch.no_grad()
def _streams(model: Any, vector: np.ndarray | None) -> np.ndarray:
    """Return the stream before each layer and after the last one, ``[layers + 1, tokens, hidden]``.

    ``vector`` is added after layer ``EDITED_LAYER``.
    """
    seen: dict[int, torch.Tensor] = {}
    blocks = _blocks(model)

    def record_input(number: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            seen[number] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return hook

    def record_output(number: int) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            stream = output[0] if isinstance(output, tuple) else output
            if number == EDITED_LAYER and vector is not None:
                stream = stream + torch.from_numpy(vector)
            seen[number + 1] = stream[0].clone()
            return (stream, *output[1:]) if isinstance(output, tuple) else stream

        return hook

    handles = []
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(record_input(number), with_kwargs=True))
        handles.append(block.register_forward_hook(record_output(number)))
    model(torch.tensor([prompt()]), use_cache=False)
    for handle in handles:
        handle.remove()
    return np.stack([seen[number].numpy() for number in range(len(blocks) + 1)])


def _blocks(model: nn.Module) -> nn.ModuleList:
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    return next(each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == layers)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), "--trust-remote-code" in sys.argv)

# SPDX-License-Identifier: Apache-2.0
"""Tiny Llamas with quantised weights, one for each scheme that vLLM computes on a CPU, and their dequantised weights.

Each scheme is written from its file format: the integers or 8-bit floats, their scales, and the order in which they are
packed. The dequantised weights are the reference for HF Transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file

from tests.conformance import float4
from tests.conformance.branches import supported_branches
from tests.conformance.cases import PROMPTS, STREAM_FIELDS, Case
from tests.conformance.engine import generate, layer_classes, steered_engine
from tests.conformance.identities import check_identities
from tests.conformance.model import TinyModel, build
from tests.conformance.proof import Proof
from tests.conformance.zoo import BY_NAME

GROUP: Final = 32
"""Rows of a weight that share a scale, in the 4-bit schemes."""
FLOAT8_ERROR: Final = 0.3
"""Largest mean distance of a row where activations have 8-bit floats, which cost up to 0.18 at layer 3.

Weights in a wrong order are at distances above 1.
"""
FLOAT8_MISS: Final = 0.45
"""Largest fraction of an edit's effect by which such a model may be off.

Correct taps are off by up to 0.35. Edits that are made one sublayer or one layer late are off by 0.53 or more, and
ablations by 0.99 or more.
"""
INT8_MISS: Final = 0.15
"""The same where activations have 8-bit integers. Correct taps are off by up to 0.071, late ones by 0.26 or more."""
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Scheme:
    """A quantisation scheme.

    ``config`` is the ``quantization_config`` of the checkpoint (None: weights are not quantised), ``quantise`` returns
    the tensors of one linear layer, by suffix, and its dequantised weight ``[out, in]``. ``engine``: engine settings.
    """

    name: str
    config: Mapping[str, Any] | None = None
    quantise: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model that differ from the row ``llama``."""
    avx512: bool = False
    """Whether vLLM's CPU kernel needs AVX-512.

    Without it the 4-bit kernel is missing, and the one of 8-bit integers adds pairs of products in 16 bits, which
    saturate (oneDNN, "Nuances of int8 computations").
    """
    max_distance: float = 0.03
    """Largest mean distance of a row from HF's on the dequantised weights; activations of 8 bits are rounded more."""
    max_miss: float | None = None

    def __str__(self) -> str:
        return self.name


def _pack(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack 4-bit numbers, eight to an int32, along a dimension."""
    groups = values.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = sum(groups[..., place] << (4 * bit) for bit, place in enumerate(order))
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)  # type: ignore[arg-type,operator]
    return packed.int().movedim(-1, dim).contiguous()


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers 0 to 15 ``[in, out]``, scales ``[in / GROUP, out]`` and the dequantised weight; the zero is 8."""
    grouped = weight.float().T.unflatten(0, (-1, GROUP))
    scales = (grouped.abs().amax(1) / 7).bfloat16()
    numbers = (grouped / scales.float()[:, None]).round().clamp(-8, 7)
    whole = (numbers * scales.float()[:, None]).flatten(0, 1).T
    return (numbers + 8).flatten(0, 1), scales, whole


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, whole = _four_bits(weight)
    zeros = torch.full(scales.shape, 8)
    return {
        "qweight": _pack(numbers, 1, _AWQ_ORDER),
        "qzeros": _pack(zeros, 1, _AWQ_ORDER),
        "scales": scales.half(),
    }, whole


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, whole = _four_bits(weight)
    # The format stores zeros minus one.
    return {
        "qweight": _pack(numbers, 0),
        "qzeros": _pack(torch.full(scales.shape, 7), 1),
        "scales": scales.half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }, whole


def _packed_int4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, whole = _four_bits(weight)
    return {
        "weight_packed": _pack(numbers.T, 1),
        "weight_scale": scales.T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }, whole


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    numbers = (weight.float() / scales).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def _float8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    numbers = (weight.float() / scales).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def _compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


def _per_token(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}


def _float4(layout: str, strategy: str, group_size: int, inputs: bool | str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group_size, "dynamic": False}
    return _compressed(layout, weights, {**weights, "symmetric": True, "dynamic": inputs} if inputs else None)


# Widths that kernels of blocks of 128 by 128 and of 4-bit floats accept.
_BLOCKS: Final = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
_CHANNEL: Final = {"num_bits": 8, "strategy": "channel", "dynamic": False}

SCHEMES: Final = (
    Scheme(
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        _awq,
        avx512=True,
    ),
    Scheme(
        "gptq",
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False},
        _gptq,
        avx512=True,
    ),
    Scheme(
        "int4 weights (compressed-tensors)",
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}, None),
        _packed_int4,
        avx512=True,
    ),
    Scheme(
        "int8 weights and activations (compressed-tensors)",
        _compressed("int-quantized", {**_CHANNEL, "type": "int"}, _per_token("int")),
        _int8,
        avx512=True,
        max_miss=INT8_MISS,
    ),
    Scheme(
        "fp8 weights and activations (compressed-tensors)",
        _compressed("float-quantized", {**_CHANNEL, "type": "float"}, _per_token("float")),
        _float8,
        max_distance=FLOAT8_ERROR,
        max_miss=FLOAT8_MISS,
    ),
    Scheme(
        "nvfp4 weights (compressed-tensors)",
        _float4("nvfp4-pack-quantized", "tensor_group", float4.NV_GROUP, "local"),
        float4.nvfp4,
        settings=_BLOCKS,
    ),
    Scheme(
        "mxfp4 weights (compressed-tensors)",
        _float4("mxfp4-pack-quantized", "group", float4.MX_GROUP, False),
        float4.mxfp4,
        settings=_BLOCKS,
    ),
)
"""Quantised weights."""

GPU_SCHEMES: Final = tuple(
    Scheme(
        f"{name}, quantised at start",
        engine={"quantization": name},
        max_distance=FLOAT8_ERROR,
        max_miss=FLOAT8_MISS,
        settings=more,
    )
    for name, more in {"fp8_per_tensor": {}, "fp8_per_block": _BLOCKS, "fp8_per_channel": {}, "mxfp8": {}}.items()
)
"""Quantised weights whose kernels exist on GPUs only."""

CACHES: Final = (
    Scheme(
        "fp8 key-value cache",
        engine={"kv_cache_dtype": "fp8"},
        avx512=True,
        max_distance=FLOAT8_ERROR,
        max_miss=FLOAT8_MISS,
    ),
)
"""Quantised key-value caches."""


def save_quantised(scheme: Scheme, tiny: TinyModel, folder: Path) -> Any:
    """Save the model with quantised decoder layers, and return HF's model with the dequantised weights in float32."""
    model: Any = build(tiny)
    model.bfloat16().save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if scheme.quantise is not None:
        for name, weight in model.state_dict().items():
            if name.startswith("model.layers.") and weight.ndim == 2:
                parts, whole = scheme.quantise(weight)
                del tensors[name]
                tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
                model.get_parameter(name).data = whole.contiguous()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.config}))
    return model.float()


def examine(scheme: Scheme, folder: Path) -> None:
    """Prove the hook points of one scheme by identities inside vLLM, and compare rows with HF Transformers."""
    llama = BY_NAME["llama"]
    engine = {**scheme.engine, "enable_prefix_caching": False}
    tiny = replace(llama, dtype="bfloat16", engine=engine, settings={**llama.settings, **scheme.settings})
    hf = save_quantised(scheme, tiny, folder)
    with float4.cpu_kernels(), steered_engine(tiny, folder, "eager", supported_branches(tiny)) as llm:
        checks = check_identities(tiny, llm)
        streams = generate(llm, [Case("plain", PROMPTS[0])], list(STREAM_FIELDS), new_tokens=1)[0].streams
        proof = Proof("LlamaForCausalLM", "identities inside vLLM", sorted(layer_classes(llm)), checks)
    with torch.no_grad():
        states = hf(torch.tensor([PROMPTS[0]]), output_hidden_states=True).hidden_states
    theirs = torch.cat(states[:-1]).numpy()
    far = np.linalg.norm(streams["pre_attn"] - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
    problems = proof.problems(tiny, scheme.max_miss)
    assert not problems, "\n".join(problems)
    by_layer = [round(float(each), 3) for each in far.reshape(len(states) - 1, -1).mean(1)]
    assert far.mean() < scheme.max_distance, f"mean distance of the rows from HF's, by layer: {by_layer}"

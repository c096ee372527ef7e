# SPDX-License-Identifier: Apache-2.0
"""Helper table: the newest models at sizes that GPU kernels accept, and random weights in their checkpoints' dtypes.

The CPU rows of these models have plain attention, formulas or an MLP in place of kernels. These rows have the kernels:
few layers and experts, but heads, latent widths and blocks of the real models.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from tests.conformance.model import LAYERS, NORM_SPREAD, TinyModel, config_of
from tests.conformance.no_reference import NO_REFERENCE, register_config, save_config
from tests.conformance.quantised import FLOAT8_MISS
from tests.conformance.zoo import BY_NAME

POSITIONS: Final = 1024
"""Longest sequence: more than ``index_topk``, so that sparse attention leaves tokens out."""
LONG: Final = tuple(3 + (7 * number) % 120 for number in range(600))
"""A prompt of more tokens than sparse attention selects."""
GAIN: Final = 1.6
"""Length by which a linear layer multiplies its input, as in the rows of width 64."""
RANK: Final = 4.0
"""Difference of the routing biases of two experts: larger than that of two scores, so rounding never swaps experts."""
PACKAGES: Final[Mapping[str, str]] = {
    "cutlass": "nvidia-cutlass-dsl",
    "deep_gemm": "DeepGEMM",
    "flashinfer": "flashinfer-python",
    "quack": "quack-kernels",
    "tilelang": "tilelang",
}
"""Modules of kernels that an installation of vLLM may lack, and the packages that have them."""
_OWN: Final = {tiny.name: tiny for tiny in NO_REFERENCE}


@dataclass(frozen=True)
class FrontierRow:
    """One model on a GPU.

    Attributes:
        tiny: Its architecture and settings.
        catches: The wrong answer that its test would catch.
        runner: The runner that vLLM chooses for it, "1" for V2 and "0" for V1.
        max_miss: For quantised weights, the largest fraction of its effect by which an edit may be off.
        long: Whether one prompt is longer than sparse attention selects.
        needs: Modules of its kernels that an installation of vLLM may lack, keys of ``PACKAGES``.
    """

    tiny: TinyModel
    catches: str
    runner: str = "1"
    max_miss: float | None = None
    long: bool = False
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.tiny.name


def _row(source: str, catches: str, name: str | None = None, *, engine: Mapping[str, Any] | None = None,
         runner: str = "1", max_miss: float | None = None, long: bool = False, needs: tuple[str, ...] = (),
         without: tuple[str, ...] = (), **settings: Any) -> FrontierRow:  # fmt: skip
    tiny = _OWN[source] if source in _OWN else BY_NAME[source]
    kept = {key: value for key, value in tiny.settings.items() if key not in without}
    own = dict(tiny.engine or {})
    own.pop("compilation_config", None)  # It mends a norm of the CPU.
    tiny = replace(
        tiny, name=name or source, dtype="bfloat16", engine={**own, **(engine or {})},
        settings={**kept, "max_position_embeddings": POSITIONS, **settings},
    )  # fmt: skip
    return FrontierRow(tiny, catches, runner, max_miss, long, needs)


_WIDE: Final[dict[str, Any]] = {"hidden_size": 2048, "intermediate_size": 1024, "moe_intermediate_size": 256}
_LATENT: Final[dict[str, Any]] = {
    **_WIDE, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 512, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_SPARSE: Final[dict[str, Any]] = {"index_topk": 512, "index_n_heads": 64, "index_head_dim": 128}
_ROPE: Final[dict[str, Any]] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_V4: Final[dict[str, Any]] = {
    "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "sliding_window": 128, "moe_intermediate_size": 256,
    "hc_sinkhorn_iters": 20, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "n_routed_experts": 8,
    "num_hash_layers": 0, "compress_rope_theta": 160000.0, "routed_scaling_factor": 1.5, **_SPARSE, **_ROPE,
}  # fmt: skip
_V41: Final[dict[str, Any]] = {
    "compress_ratios": [0, 1, 2, 0], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2],
}  # fmt: skip
_BLOCKS: Final[dict[str, Any]] = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}  # fmt: skip
_DELTA: Final[dict[str, Any]] = {
    "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 16, "head_dim": 128, "short_conv_kernel_size": 4,
}  # fmt: skip
_KIMI: Final[dict[str, Any]] = {
    **_LATENT, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "head_dim": 72, **_ROPE,
}  # fmt: skip
_MXFP4: Final[dict[str, Any]] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
_QWEN: Final[dict[str, Any]] = {
    **_WIDE, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "hc_lowrank": 128,
    "shared_expert_intermediate_size": 256, "norm_topk_prob": True, "num_experts_per_tok": 4,
}  # fmt: skip
_SIGMOID: Final[dict[str, Any]] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_CUTE: Final = ("cutlass", "quack")
_SPARSE_CODE: Final = ("deep_gemm",)
_MIXED_CODE: Final = ("deep_gemm", "tilelang")
_V4_CODE: Final = (*_MIXED_CODE, *_CUTE)
_EXPERTS: Final = ["dense", *["sparse"] * (LAYERS - 1)]
_FP8: Final = {"kv_cache_dtype": "fp8"}

FRONTIER: Final[tuple[FrontierRow, ...]] = (
    _row("hy_v4", "streams of HY V4 that do not mix, whose kernel adds a branch in place", long=True,
         needs=_SPARSE_CODE, **{**_LATENT, **_SPARSE}, enable_ihc=True, gated_mla=True, gating_type="headwise",
         learnable_sink=True, layer_types=["deepseek_sparse_attention"] * LAYERS, mlp_layer_types=_EXPERTS),
    _row("qwen4_exp", "edits of streams in bfloat16 that the kernel adds to only one of them", needs=_CUTE, **_QWEN),
    _row("kimi_k3", "a stored sum that the kernel of attention residuals writes before its edit", needs=_CUTE,
         without=("linear_attn_config",), **_KIMI,
         linear_attn_config={**_DELTA, "use_full_rank_gate": True, "gate_lower_bound": -5.0}),
    _row("inkling", "a convolution of a branch that runs over edited rows twice, with its own caches", needs=_CUTE,
         engine={"num_gpu_blocks_override": 1024}, hidden_size=1536, intermediate_size=768, dense_intermediate_size=768,
         num_attention_heads=12, num_key_value_heads=4, head_dim=128, sliding_window_size=512, d_rel=16,
         rel_extent=1024),
    _row("glm5_next", "the mean of streams at the last layer, and an index that pools its keys", long=True,
         needs=_MIXED_CODE, without=("qk_rope_head_dim",), **{**_LATENT, **_SPARSE, "qk_rope_head_dim": 0},
         linear_num_heads=16, linear_head_dim=128, linear_conv_kernel_dim=4, linear_lower_bound=-5.0,
         index_kpool_always_select_tail=True, hc_sinkhorn_iters=20, n_routed_experts=4, n_shared_experts=1,
         num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
         **_SIGMOID, mlp_layer_types=_EXPERTS, indexer_rope_interleave=True),
    _row("deepseek_v4", "streams that the kernel of the mixes completes in another order than the taps", long=True,
         needs=_V4_CODE, engine=_FP8, compress_ratios=[0, 4, 128, 4], **_V4),
    _row("deepseek_v41", "mixes that are delayed by one sublayer and read a stream before its edit", long=True,
         needs=_V4_CODE, engine=_FP8, **{**_V4, **_V41}),
    _row("deepseek_v41_engram", "an edit in front of a memory of n-grams whose kernel reads the unedited streams",
         long=True, needs=_V4_CODE, engine=_FP8, **{**_V4, **_V41}),
    _row("deepseek_v32", "an edit that the indexer does not read, and a tap in front of the fused add and norm",
         long=True, needs=_SPARSE_CODE, **_LATENT, **_SPARSE, **_ROPE, **_SIGMOID),
    _row("glm_moe_dsa", "taps of GLM 5 that are right for DeepSeek's settings only", long=True, needs=_SPARSE_CODE,
         **_LATENT, **_SPARSE, **_ROPE, **_SIGMOID),
    _row("kimi_linear", "a tap on one summand beside the kernel of delta attention", needs=_CUTE,
         without=("linear_attn_config",), **_KIMI, linear_attn_config={**_DELTA, "head_dim": 128}),
    _row("qwen4_exp", "the same beside its sparse attention (QSA)", "qwen4_exp_sparse", long=True, needs=_CUTE, **{
         **_QWEN, "head_dim": 256, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128,
         "indexer_compress_ratio": 4, "indexer_budget": 2048,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
    _row("deepseek_v4", "the same with the weights of its checkpoint: 8-bit blocks and MXFP4 experts",
         "deepseek_v4_quantised", long=True, needs=_V4_CODE, engine=_FP8, max_miss=FLOAT8_MISS,
         compress_ratios=[0, 4, 128, 4], expert_dtype="fp4", quantization_config=_BLOCKS,
         **{**_V4, "swiglu_limit": 10.0}),
    _row("deepseek_v32", "the same with DeepSeek's own 8-bit cache (fp8_ds_mla)", "deepseek_v32_fp8_ds_mla", long=True,
         needs=_SPARSE_CODE, engine=_FP8, **_LATENT, **_SPARSE, **_ROPE, **_SIGMOID),
    _row("gpt_oss", "an edit that is made behind experts in MXFP4, and sinks that shift with it",
         "gpt_oss_mxfp4", hidden_size=512, intermediate_size=512, sliding_window=128, head_dim=64,
         num_attention_heads=8, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=8,
         quantization_config=_MXFP4),
    _row("deepseek_v3", "a tap behind the reduction of experts, and latent attention whose output is added late",
         engine={}, **_LATENT, **_SIGMOID, n_routed_experts=8, n_group=1, topk_group=1),
    _row("deepseek_v3", "edits that an 8-bit cache of latents loses or rounds away", "deepseek_v3_fp8_cache",
         engine=_FP8, **_LATENT, **_SIGMOID, n_routed_experts=8, n_group=1, topk_group=1),
    _row("minimax_m3", "a tap on the MLP's output in front of its sum, with sparse attention by blocks", long=True, **{
         **_WIDE, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64,
         "partial_rotary_factor": 0.5, "dense_intermediate_size": 1024, "num_local_experts": 4,
         "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 1, 1], "n_shared_experts": 1, "scoring_func": "sigmoid",
         "use_routing_bias": True, "sparse_attention_config": {
             "use_sparse_attention": True, "sparse_attention_freq": [0, 1] * (LAYERS // 2),
             "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_topk_blocks": 4, "sparse_block_size": 128,
             "sparse_init_block": 0, "sparse_local_block": 1, "sparse_score_type": "max"}}),
    _row("bailing_moe_v3", "a tap beside delta attention that runs before its output is gated",
         **{**_LATENT, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}),
)  # fmt: skip
"""All models but Gemma 3n, which is compared with HF Transformers, by priority: first those that no GPU has run yet."""


def save_row(tiny: TinyModel, folder: Path) -> Path:
    """Save the row's config.json, by HF's class if HF has the model, and return its folder."""
    if not tiny.is_known_to_hf:
        return save_config(tiny, folder)
    path = folder / tiny.name
    extra = {name: tiny.settings[name] for name in ("quantization_config",) if name in tiny.settings}
    plain = {name: value for name, value in tiny.settings.items() if name not in extra}
    config_of(replace(tiny, settings=plain)).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    architecture = tiny.architecture or _ARCHITECTURES[tiny.config]
    (path / "config.json").write_text(json.dumps({**config, **extra, "architectures": [architecture]}))
    return path


_ARCHITECTURES: Final = {"DeepseekV3Config": "DeepseekV3ForCausalLM", "GptOssConfig": "GptOssForCausalLM"}


@contextmanager
def frontier_weights(tiny: TinyModel) -> Iterator[dict[str, Any]]:
    """Yield engine settings for random weights, also quantised ones, whose scales give the weights a fixed length."""
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    register_config(tiny.config)
    seed = zlib.crc32(tiny.name.encode())

    @torch.no_grad()
    def load(loader: Any, model: torch.nn.Module, model_config: Any) -> None:
        generators: dict[torch.device, torch.Generator] = {}
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                loader._process_online_quant_layer(layer, info)
                continue
            for name, tensor in dummy_loader.get_layer_tensors(layer).items():
                if name in layer._non_persistent_buffers_set or tensor.device.type == "meta":
                    continue
                if tensor.device not in generators:
                    generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
                fill(name, tensor, generators[tensor.device])

    with patch.object(dummy_loader.DummyModelLoader, "load_weights", load):
        yield {"load_format": "dummy", "enable_prefix_caching": False}


def fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill one tensor of a layer by its name and dtype."""
    is_scale = "weight_scale" in name or name.endswith("scale_inv")
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        # Distinct ranks route all tokens to the same experts. Scores by the token alone are swapped by rounding, and
        # one such token changes the following ones by attention.
        tensor.copy_(RANK * torch.randperm(len(tensor), generator=generator, device=tensor.device))
        return
    if name.endswith(("k_scale", "v_scale", "q_scale", "prob_scale", "input_scale")):
        return  # The scales of a cache: 1 unless a checkpoint has them.
    if is_scale and tensor.ndim > 1:
        _fill_scale(tensor)
    elif tensor.dtype == torch.uint8:
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator, device=tensor.device))
    elif tensor.dtype == torch.float8_e4m3fn:
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=tensor.device).clamp(-4.0, 4.0))
    elif tensor.is_floating_point():
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        size = GAIN / math.sqrt(tensor.shape[-1]) if tensor.ndim > 1 else 0.0
        values = size * noise if tensor.ndim > 1 else 1.0 + NORM_SPREAD * noise.clamp(-1.0, 1.0)
        tensor.copy_(values.bfloat16())


def _fill_scale(tensor: torch.Tensor) -> None:
    """Fill scales of blocks of 32 (bytes: MXFP4) or 128 columns (8-bit floats) with one power of two."""
    four_bits = tensor.dtype == torch.uint8
    columns = tensor.shape[-1] * (32 if four_bits else 128)
    # The root mean square of a random 4-bit float is 2.9.
    exponent = round(math.log2(GAIN / math.sqrt(columns) / (2.9 if four_bits else 1.0)))
    if four_bits:
        tensor.fill_(127 + exponent)
    elif tensor.dtype == torch.float8_e8m0fnu:
        tensor.view(torch.uint8).fill_(127 + exponent)
    else:
        tensor.fill_(2.0**exponent)

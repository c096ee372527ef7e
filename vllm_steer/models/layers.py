# SPDX-License-Identifier: Apache-2.0
"""Tables of decoder-layer classes that need no more than the name of one submodule, or the reason why they are refused.

The keys are qualified class names, short of ``vllm.model_executor.models.`` in the tables of vLLM's own classes and of
``transformers.models.`` in those of the Transformers backend. The values name the submodule in front of which the
stream stands between attention (or whatever mixes tokens in that block) and MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ENTRY: Final = "the block's input"
"""In the place of a submodule: the block has an MLP alone, so the stream after attention is the stream that enters."""
EXIT: Final = "the block's output"
"""In the place of a submodule: the block has a mixer alone, so the stream after it is the stream that leaves."""


def layer_count(hf_text_config: Any) -> int:
    """How many decoder layers a model has: LongCat counts two attentions for each among its hidden layers, and its
    layers apart. Scheduler, workers and front end have it from here."""
    hidden = int(hf_text_config.num_hidden_layers)
    apart = getattr(hf_text_config, "num_layers", None)
    return hidden // 2 if apart is not None and 2 * apart == hidden else hidden


_SECOND: Final = "post_attention_layernorm"

PAIR: Final[Mapping[str, str]] = {
    "afmoe.AfmoeDecoderLayer": "pre_mlp_layernorm",
    "apertus.ApertusDecoderLayer": "feedforward_layernorm",
    "bailing_moe.BailingMoeBlock": _SECOND,
    "ernie45_moe.Ernie4_5_MoeDecoderLayer": _SECOND,
    "exaone.ExaoneDecoderLayer": "ln_2",
    "exaone_moe.ExaoneMoeDecoderLayer": _SECOND,
    "glm4_moe.Glm4MoeDecoderLayer": _SECOND,
    "glm4_moe_lite.Glm4MoeLiteDecoderLayer": _SECOND,
    "gpt_oss.TransformerBlock": _SECOND,
    "hy_v3.HYV3DecoderLayer": _SECOND,
    "internlm2.InternLMDecoderLayer": "ffn_norm",
    "k2_horizon.K2HorizonDecoderLayer": _SECOND,
    "laguna.LagunaDecoderLayer": _SECOND,
    "llama4.Llama4DecoderLayer": _SECOND,
    "mimo_v2.MiMoV2FlashDecoderLayer": _SECOND,
    "minimax_m2.MiniMaxM2DecoderLayer": _SECOND,
    "param2moe.Param2MoEDecoderLayer": _SECOND,
    "plamo3.Plamo3DecoderLayer": "pre_mlp_norm",
    "rnj1.Rnj1DecoderLayer": "pre_feedforward_layernorm",
    "sarvam.SarvamMLABlock": _SECOND,
    "step1.StepDecoderLayer": _SECOND,
    "step3_text.Step3TextDecoderLayer": _SECOND,
    # Mixers in the place of attention.
    "bailing_moe_linear.BailingMoeV25DecoderLayer": _SECOND,
    "jamba.JambaAttentionDecoderLayer": "pre_ff_layernorm",
    "jamba.JambaMambaDecoderLayer": "pre_ff_layernorm",
    "lfm2.Lfm2AttentionDecoderLayer": "ffn_norm",
    "lfm2.Lfm2ShortConvDecoderLayer": "ffn_norm",
    "lfm2_moe.Lfm2MoeAttentionDecoderLayer": "ffn_norm",
    "lfm2_moe.Lfm2MoeShortConvDecoderLayer": "ffn_norm",
    # Blocks of one branch.
    "mamba.MambaDecoderLayer": EXIT,
    "mamba2.Mamba2DecoderLayer": EXIT,
    "nemotron_h.NemotronHMambaDecoderLayer": EXIT,
    "nemotron_h.NemotronHAttentionDecoderLayer": EXIT,
    "nemotron_h.NemotronHMLPDecoderLayer": ENTRY,
    "nemotron_h.NemotronHMoEDecoderLayer": ENTRY,
}
"""Two summands, ``(hidden_states, residual)``."""

SINGLE: Final[Mapping[str, str]] = {
    "dbrx.DbrxBlock": "norm_attn_norm.norm_2",
    "falcon_h1.FalconH1ParallelHybrid": "pre_ff_layernorm",
    "gemma4.Gemma4DecoderLayer": "pre_feedforward_layernorm",
    "granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer": _SECOND,
    "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer": _SECOND,
    "granitemoeshared.GraniteMoeSharedDecoderLayer": _SECOND,
    "hyperclovax.HyperCLOVAXDecoderLayer": _SECOND,
    "minicpm.MiniCPMDecoderLayer": _SECOND,
    "minicpm3.MiniCPM3DecoderLayer": _SECOND,
    "muse_glimmer.MuseGlimmerDecoderLayer": "pre_feedforward_layernorm",
    "orion.OrionDecoderLayer": _SECOND,
    "phimoe.PhiMoEDecoderLayer": _SECOND,
    "step3p5.Step3p5DecoderLayer": _SECOND,
    # The shared attention and MLP of a hybrid layer are a branch of its mixer's input.
    "zamba2.Zamba2HybridLayer": EXIT,
    "zamba2.Zamba2MambaDecoderLayer": EXIT,
}
"""One tensor."""

TRANSFORMERS: Final[Mapping[str, str]] = {
    "arcee.modeling_arcee.ArceeDecoderLayer": _SECOND,
    "bitnet.modeling_bitnet.BitNetDecoderLayer": _SECOND,
    "cwm.modeling_cwm.CwmDecoderLayer": _SECOND,
    "dots1.modeling_dots1.Dots1DecoderLayer": _SECOND,
    "flex_olmo.modeling_flex_olmo.FlexOlmoDecoderLayer": "mlp",
    "glm.modeling_glm.GlmDecoderLayer": _SECOND,
    "gpt_bigcode.modeling_gpt_bigcode.GPTBigCodeBlock": "ln_2",
    "helium.modeling_helium.HeliumDecoderLayer": _SECOND,
    "hunyuan_v1_dense.modeling_hunyuan_v1_dense.HunYuanDenseV1DecoderLayer": _SECOND,
    "hunyuan_v1_moe.modeling_hunyuan_v1_moe.HunYuanMoEV1DecoderLayer": _SECOND,
    "jais2.modeling_jais2.Jais2DecoderLayer": _SECOND,
    "mellum.modeling_mellum.MellumDecoderLayer": _SECOND,
    "ministral.modeling_ministral.MinistralDecoderLayer": _SECOND,
    "nanochat.modeling_nanochat.NanoChatDecoderLayer": _SECOND,
    "olmo.modeling_olmo.OlmoDecoderLayer": _SECOND,
    "olmo2.modeling_olmo2.Olmo2DecoderLayer": "mlp",
    "olmo3.modeling_olmo3.Olmo3DecoderLayer": "mlp",
    "persimmon.modeling_persimmon.PersimmonDecoderLayer": _SECOND,
    "seed_oss.modeling_seed_oss.SeedOssDecoderLayer": _SECOND,
    "smollm3.modeling_smollm3.SmolLM3DecoderLayer": _SECOND,
    "solar_open.modeling_solar_open.SolarOpenDecoderLayer": _SECOND,
    "starcoder2.modeling_starcoder2.Starcoder2DecoderLayer": _SECOND,
    "vaultgemma.modeling_vaultgemma.VaultGemmaDecoderLayer": "pre_feedforward_layernorm",
}
"""HF's own layers, which keep the stream in one tensor."""

INHERITED: Final[Mapping[str, str]] = {
    "aria.AriaTextDecoderLayer": "llama.LlamaDecoderLayer",
    "qwen3_vl.Qwen3VLDecoderLayer": "qwen3.Qwen3DecoderLayer",
    "qwen3_vl_moe.Qwen3VLMoeDecoderLayer": "qwen3_moe.Qwen3MoeDecoderLayer",
}
"""Classes that differ in what they are built of alone: their forward is that of the class they are derived from."""

AWAITING: Final[frozenset[str]] = frozenset()
"""Classes whose recipe has no proof: their kernels are for GPUs, and a run there failed or was not made. They have no
digest, so they are refused like a class that nobody has seen, unless the user allows unproven ones. None at present."""

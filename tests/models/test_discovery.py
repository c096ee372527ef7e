# SPDX-License-Identifier: Apache-2.0
"""Discovery of decoder layers, on models that are lists of empty layers with the right class names."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.offloader import PrefetchOffloader

from vllm_steer.models.discovery import (
    UnsupportedModelError,
    caches_behind_attention,
    find_decoder,
    layer_count,
    run_count,
)
from vllm_steer.models.install import install_taps
from vllm_steer.models.recipes import RECIPES, UNSUPPORTED

LAYERS = 3
LLAMA = "vllm.model_executor.models.llama.LlamaDecoderLayer"
OPT = "vllm.model_executor.models.opt.OPTDecoderLayer"
DEEPSEEK = "vllm.model_executor.models.deepseek_v2.DeepseekV2DecoderLayer"
DELAYED = "vllm.models.deepseek_v41.nvidia.model.DeepseekV4DecoderLayer"
CONFIG = SimpleNamespace(num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def any_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the comparison of sources, which test_digests covers: these layers have no code."""
    monkeypatch.setattr("vllm_steer.models.discovery.why_unproven", lambda cls: None)


def layer(qualified: str, **settings: Any) -> nn.Module:
    """Return a module with these attributes whose class has this name."""
    module, name = qualified.rsplit(".", 1)
    made: nn.Module = type(name, (nn.Module,), {"__module__": module})()
    dtype = settings.pop("dtype", torch.float32)
    made.weight = nn.Parameter(torch.zeros(1, dtype=settings.pop("weights", dtype)), requires_grad=False)
    made.input_layernorm = nn.LayerNorm(1, dtype=dtype)
    for key, value in settings.items():
        setattr(made, key, value)
    return made


def model(*lists: nn.ModuleList) -> nn.Module:
    made = nn.Module()
    for index, layers in enumerate(lists):
        setattr(made, f"layers_{index}", layers)
    return made


def of(qualified: str, **settings: Any) -> nn.ModuleList:
    return nn.ModuleList(layer(qualified, **settings) for _ in range(LAYERS))


def test_finds_all_layers_in_order() -> None:
    """Catches a vision tower or another list that is mistaken for the decoder, and layers out of order."""
    layers = of(LLAMA)
    decoder = find_decoder(model(of("some.tower.Block"), layers), CONFIG)
    assert [layer.module for layer in decoder.layers] == list(layers)
    assert [layer.number for layer in decoder.layers] == [0, 1, 2]


def test_accepts_the_same_layers_in_two_lists() -> None:
    """Catches a refusal of Gemma 4, which keeps its layers in two lists."""
    layers = of(LLAMA)
    assert len(find_decoder(model(layers, nn.ModuleList(list(layers))), CONFIG).layers) == LAYERS


def test_refuses_two_lists_of_layers() -> None:
    """Catches an encoder-decoder that is steered in one half only."""
    with pytest.raises(UnsupportedModelError, match="2 lists of 3"):
        find_decoder(model(of(LLAMA), of(LLAMA)), CONFIG)


@pytest.mark.parametrize("qualified", sorted(UNSUPPORTED))
def test_refuses_unsupported_classes_with_the_reason(qualified: str) -> None:
    """Catches an engine that starts on an unsupported class, and a refusal without the reason."""
    with pytest.raises(UnsupportedModelError) as error:
        find_decoder(model(of(qualified)), CONFIG)
    assert qualified.rsplit(".", 1)[1] in str(error.value)
    assert UNSUPPORTED[qualified] in str(error.value)


def test_names_an_unsupported_class_if_its_list_has_another_length() -> None:
    """Catches the reason "no list of layers found" for a class that is known not to be supported."""
    other = nn.ModuleList(layer("vllm.models.deepseek_v41.amd.model.DeepseekV4DecoderLayer") for _ in range(2))
    with pytest.raises(UnsupportedModelError, match="proven only for the kernels of NVIDIA's GPUs"):
        find_decoder(model(other), CONFIG)


@pytest.mark.parametrize(
    ("settings", "replay", "reason"),
    [
        ({}, True, "--no-swa-bounded-replay"),
        ({"fuse_mhc_all_reduce": True}, False, "--disable-custom-all-reduce"),
        ({"use_sequence_parallel": True}, False, "a part of the tokens; start it without --enable-expert-parallel"),
    ],
)
def test_refuses_delayed_mixes_that_hide_rows_or_sums(settings: dict[str, Any], replay: bool, reason: str) -> None:
    """Catches taps that miss tokens or partial sums, and a refusal that does not name the setting."""
    plain = {"fuse_mhc_all_reduce": False, "use_sequence_parallel": False}

    def layers(replay: bool, **changed: Any) -> nn.ModuleList:
        attn = nn.Module()
        attn.swa_cache_layer = SimpleNamespace(bounded_replay=replay)
        return of(DELAYED, **{**plain, **changed}, attn=attn)

    assert len(find_decoder(model(layers(False)), CONFIG).layers) == LAYERS
    with pytest.raises(UnsupportedModelError, match=reason):
        find_decoder(model(layers(replay, **settings)), CONFIG)


def test_marks_layers_that_add_a_memory_before_they_read_the_streams() -> None:
    """Catches a self-check that demands that such a layer reads what the layer before it leaves."""
    attn = nn.Module()
    attn.swa_cache_layer = SimpleNamespace(bounded_replay=False)
    layers = of(DELAYED, fuse_mhc_all_reduce=False, use_sequence_parallel=False, attn=attn)
    config = SimpleNamespace(num_hidden_layers=LAYERS, engram_layer_ids=[1])
    assert find_decoder(model(layers), config).gaps == {("pre_attn", 1)}
    assert not find_decoder(model(layers), CONFIG).gaps


def test_numbers_every_run_of_a_looped_layer() -> None:
    """Catches a pass that is left out, and runs in another order than the model's."""
    looped = of("vllm.model_executor.models.iquest_loopcoder.LoopCoderDecoderLayer")
    body = model(looped)
    body.gate_projections, body.layers = nn.ModuleList(), looped
    decoder = find_decoder(body, SimpleNamespace(num_hidden_layers=LAYERS, loop_num=2))
    assert [(each.number, each.module, each.run) for each in decoder.layers] == [
        (run * LAYERS + i, looped[i], run) for run in range(2) for i in range(LAYERS)
    ]
    assert (decoder.num_layers, decoder.loops, decoder.gaps) == (2 * LAYERS, True, frozenset())


def test_knows_where_the_stream_is_not_the_one_before() -> None:
    """Catches a self-check that refuses Solar, whose blocks mix in earlier streams, and models with cross-attention."""
    config = SimpleNamespace(num_hidden_layers=LAYERS, bskcn_3=[1], bskcn_4=[2])
    decoder = find_decoder(model(of("vllm.model_executor.models.solar.SolarDecoderLayer")), config)
    assert decoder.gaps == {("pre_attn", 1), ("pre_attn", 2)}
    whisper = of("vllm.model_executor.models.whisper.WhisperDecoderLayer")
    # The configuration counts the layers of the encoder.
    decoder = find_decoder(model(whisper), SimpleNamespace(num_hidden_layers=LAYERS + 3, decoder_layers=LAYERS))
    assert decoder.gaps == {("post_block", number) for number in range(LAYERS)}


def test_knows_what_the_head_reads() -> None:
    """Catches a head that mixes streams taken for one that reads the stream of the points, and the reverse."""
    gemma3n = find_decoder(model(of("vllm.model_executor.models.gemma3n.Gemma3nDecoderLayer")), CONFIG)
    reason = "Gemma3nDecoderLayer has several streams, and the final norm reads another mix of them"
    assert str(gemma3n.mixed_head).startswith(reason)
    assert replace(gemma3n, layers=gemma3n.layers[:-1]).mixed_head is None  # the last stage knows
    averaged = of("vllm.models.glm5next.common.model.Glm5NextDecoderLayer", mhc=True)
    assert find_decoder(model(averaged), CONFIG).mixed_head is None
    assert find_decoder(model(of(LLAMA)), CONFIG).mixed_head is None


def test_knows_which_layers_alter_their_branches() -> None:
    """Catches a norm behind a branch that is reported for other layers than those that have it."""
    gemma2 = find_decoder(model(of("vllm.model_executor.models.gemma2.Gemma2DecoderLayer")), CONFIG)
    assert gemma2.altered() == {"attn_out": [0, 1, 2], "mlp_out": [0, 1, 2]}
    name, more = "vllm.model_executor.models.AXK1.AXK1DecoderLayer", {"routed_scaling_factor": None}
    axk1 = nn.ModuleList(layer(name, is_layer_sparse=sparse, **more) for sparse in (False, True, True))
    assert find_decoder(model(axk1), CONFIG).altered() == {"attn_out": [], "mlp_out": [1, 2]}
    assert find_decoder(model(of(LLAMA)), CONFIG).altered() == {"attn_out": [], "mlp_out": []}


def test_refuses_unknown_classes_by_name() -> None:
    """Catches an unproven class that is steered."""
    with pytest.raises(UnsupportedModelError, match=r"no recipe for its decoder layers .*SomeDecoderLayer"):
        find_decoder(model(of("vllm.model_executor.models.new.SomeDecoderLayer")), CONFIG)


def test_refuses_an_unknown_layer_among_known_ones() -> None:
    """Catches a layer that is silently left without taps."""
    layers = nn.ModuleList([layer(LLAMA), layer("vllm.model_executor.models.new.Odd"), layer(LLAMA)])
    with pytest.raises(UnsupportedModelError, match=r"layer 1, .*Odd"):
        find_decoder(model(layers), CONFIG)


def test_settings_choose_the_variant() -> None:
    """Catches an edit after the norm that follows the sum in OPT-350m."""
    before = find_decoder(model(of(OPT, do_layer_norm_before=True)), CONFIG)
    after = find_decoder(model(of(OPT, do_layer_norm_before=False)), CONFIG)
    assert {layer.recipe.post_attn for layer in before.layers} == {"final_layer_norm"}
    assert {layer.recipe.post_attn for layer in after.layers} == {"self_attn_layer_norm"}
    assert RECIPES[OPT].post_attn == "final_layer_norm"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": torch.float16}, "use --dtype bfloat16"),
        ({"dtype": torch.float16, "weights": torch.float8_e4m3fn}, "float16"),
        ({"use_sequence_parallel_moe": True}, "only a part of the tokens; start it without --enable-expert-parallel"),
    ],
)
def test_refuses_unproven_settings(settings: dict[str, Any], reason: str) -> None:
    """Catches a DeepSeek stream that is steered although float16 scales it or sequence parallelism splits it."""
    with pytest.raises(UnsupportedModelError, match=reason):
        find_decoder(model(of(DEEPSEEK, routed_scaling_factor=2.5, **settings)), CONFIG)


def test_accepts_float16_without_a_scaling_factor() -> None:
    """Catches a refusal of models whose stream is not scaled."""
    for factor in (1.0, None):
        decoder = find_decoder(model(of(DEEPSEEK, dtype=torch.float16, routed_scaling_factor=factor)), CONFIG)
        assert len(decoder.layers) == LAYERS


def test_refuses_layers_whose_forward_is_replaced() -> None:
    """Catches taps that weight offloading removes at the first call, and an engine that stops without a reason."""
    layers = of(LLAMA)
    # Made without its CUDA stream, which replacing a layer's forward does not need.
    PrefetchOffloader._hook_module_forward(PrefetchOffloader.__new__(PrefetchOffloader), 0, layers[1])
    decoder, tables = find_decoder(model(layers), CONFIG), SimpleNamespace(points=())
    with pytest.raises(UnsupportedModelError, match=r"layer 1, LlamaDecoderLayer.*weight offloading.*--offload-group"):
        install_taps(decoder, tables)  # type: ignore[arg-type]


def test_layer_count() -> None:
    """Catches LongCat counted with twice its layers: its configuration counts attentions, two per layer."""
    assert layer_count(SimpleNamespace(num_hidden_layers=56, num_layers=28)) == 28
    assert layer_count(SimpleNamespace(num_hidden_layers=32)) == 32
    assert layer_count(SimpleNamespace(num_hidden_layers=32, num_layers=32)) == 32


def test_run_count() -> None:
    """Catches a scheduler that counts the layers of a looped model instead of their runs, or an encoder's layers."""
    config = {"num_hidden_layers": 32}
    assert run_count(SimpleNamespace(**config)) == 32
    assert run_count(SimpleNamespace(**config, loop_num=2)) == 64
    hrm = {"num_layers_per_stack": 16, "H_cycles": 2, "L_cycles": 3}
    assert run_count(SimpleNamespace(num_hidden_layers=128, **hrm)) == 128
    assert run_count(SimpleNamespace(num_hidden_layers=16, **hrm)) == 128
    assert run_count(SimpleNamespace(**config, decoder_layers=4)) == 4
    assert run_count(SimpleNamespace(**config, decoder=SimpleNamespace(decoder_layers=10))) == 10
    assert run_count(SimpleNamespace(**config, transf_decoder={"config_dict": {"num_layers": 8}})) == 8


def test_refuses_a_model_that_runs_other_layers_than_its_configuration_counts() -> None:
    """Catches budgets of the scheduler for another number of layers than the model runs."""
    looped = of("vllm.model_executor.models.iquest_loopcoder.LoopCoderDecoderLayer")
    body = model(looped)
    body.gate_projections, body.layers = nn.ModuleList(), looped
    message = rf"runs {2 * LAYERS} decoder layers, .* describes {LAYERS}\. .* --hf-overrides"
    with pytest.raises(UnsupportedModelError, match=message):
        find_decoder(body, CONFIG)


@pytest.mark.parametrize("field", ["sconv_kernel_size", "loop_num", "H_cycles"])
def test_recognizes_models_whose_last_layer_caches_more(field: str) -> None:
    """Catches an edit behind the last attention that shares cached blocks with requests without it."""
    assert caches_behind_attention(SimpleNamespace(num_hidden_layers=LAYERS, **{field: 4}))
    assert not caches_behind_attention(CONFIG)

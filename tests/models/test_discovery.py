# SPDX-License-Identifier: Apache-2.0
"""Finding decoder layers, on models that are lists of empty layers with the right class names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.offloader import PrefetchOffloader

from vllm_steer.models.discovery import UnsupportedModelError, find_decoder
from vllm_steer.models.install import install_taps
from vllm_steer.models.layers import layer_count
from vllm_steer.models.recipes import BY_LAYER
from vllm_steer.models.refused import REFUSED

LAYERS = 3
LLAMA = "vllm.model_executor.models.llama.LlamaDecoderLayer"
OPT = "vllm.model_executor.models.opt.OPTDecoderLayer"
DEEPSEEK = "vllm.model_executor.models.deepseek_v2.DeepseekV2DecoderLayer"
CONFIG = SimpleNamespace(num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def any_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """These layers have no code: what is compared with proven sources is left to test_digests."""
    monkeypatch.setattr("vllm_steer.models.discovery.why_unproven", lambda cls: None)


def layer(qualified: str, **settings: Any) -> nn.Module:
    """A module whose class has this name, and these attributes."""
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


def test_all_layers_are_found_in_order() -> None:
    """Catches a vision tower or another list taken for the decoder, and layers out of order."""
    layers = of(LLAMA)
    decoder = find_decoder(model(of("some.tower.Block"), layers), CONFIG)
    assert [site.layer for site in decoder.sites] == list(layers)
    assert [site.number for site in decoder.sites] == [0, 1, 2]


def test_one_list_kept_twice_is_one_list() -> None:
    """Catches the refusal of Gemma 4, which keeps its layers in two lists."""
    layers = of(LLAMA)
    assert len(find_decoder(model(layers, nn.ModuleList(list(layers))), CONFIG).sites) == LAYERS


def test_two_lists_of_layers_are_refused() -> None:
    """Catches an encoder-decoder of which one half would be steered."""
    with pytest.raises(UnsupportedModelError, match="2 lists of 3"):
        find_decoder(model(of(LLAMA), of(LLAMA)), CONFIG)


@pytest.mark.parametrize("qualified", sorted(REFUSED))
def test_classes_that_were_looked_at_are_refused_with_the_reason(qualified: str) -> None:
    """Catches an engine that starts on them, and a refusal that leaves the user without a reason."""
    with pytest.raises(UnsupportedModelError) as error:
        find_decoder(model(of(qualified)), CONFIG)
    assert qualified.rsplit(".", 1)[1] in str(error.value)
    assert REFUSED[qualified] in str(error.value)


def test_a_refused_class_is_named_where_its_list_has_another_length() -> None:
    """Catches "no list of layers found" for models whose layers are run several times."""
    looped = nn.ModuleList(layer("vllm.model_executor.models.hrm_text.HrmTextDecoderLayer") for _ in range(2))
    with pytest.raises(UnsupportedModelError, match="run several times"):
        find_decoder(model(looped), CONFIG)


def test_unknown_classes_are_refused_by_name() -> None:
    """Catches a class that nobody has proven being steered."""
    with pytest.raises(UnsupportedModelError, match=r"no recipe for its decoder layers .*SomeDecoderLayer"):
        find_decoder(model(of("vllm.model_executor.models.new.SomeDecoderLayer")), CONFIG)


def test_an_unknown_layer_among_known_ones_is_refused() -> None:
    layers = nn.ModuleList([layer(LLAMA), layer("vllm.model_executor.models.new.Odd"), layer(LLAMA)])
    with pytest.raises(UnsupportedModelError, match=r"layer 1, .*Odd"):
        find_decoder(model(layers), CONFIG)


def test_settings_choose_the_variant() -> None:
    """Catches OPT-350m's edit behind the norm that follows the sum."""
    before = find_decoder(model(of(OPT, do_layer_norm_before=True)), CONFIG)
    after = find_decoder(model(of(OPT, do_layer_norm_before=False)), CONFIG)
    assert {site.recipe.mid for site in before.sites} == {"final_layer_norm"}
    assert {site.recipe.mid for site in after.sites} == {"self_attn_layer_norm"}
    assert BY_LAYER[OPT].mid == "final_layer_norm"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"dtype": torch.float16, "weights": torch.float8_e4m3fn}, "float16"),
        ({"use_sequence_parallel_moe": True}, "a part of the tokens"),
    ],
)
def test_settings_that_are_not_proven_are_refused(settings: dict[str, Any], reason: str) -> None:
    """Catches DeepSeek's stream, which float16 scales and sequence parallelism cuts, being steered as it is."""
    with pytest.raises(UnsupportedModelError, match=reason):
        find_decoder(model(of(DEEPSEEK, routed_scaling_factor=2.5, **settings)), CONFIG)


def test_float16_that_scales_nothing_is_served() -> None:
    """Catches a refusal of models that have no such factor, for a scaling that does not happen."""
    for factor in (1.0, None):
        decoder = find_decoder(model(of(DEEPSEEK, dtype=torch.float16, routed_scaling_factor=factor)), CONFIG)
        assert len(decoder.sites) == LAYERS


def test_layers_whose_forward_vllm_replaces_are_refused() -> None:
    """Catches taps that weight offloading takes away with the first call, and an engine that ends without a reason."""
    layers = of(LLAMA)
    # Made without its CUDA stream: what it does to a layer's forward needs none.
    PrefetchOffloader._hook_module_forward(PrefetchOffloader.__new__(PrefetchOffloader), 0, layers[1])
    decoder, tables = find_decoder(model(layers), CONFIG), SimpleNamespace(points=())
    with pytest.raises(UnsupportedModelError, match=r"layer 1, LlamaDecoderLayer.*weight offloading.*--offload-group"):
        install_taps(decoder, tables)  # type: ignore[arg-type]


def test_layers_are_counted_alike_everywhere() -> None:
    """Catches a scheduler that books twice the layers that LongCat has: two attentions count as one layer."""
    assert layer_count(SimpleNamespace(num_hidden_layers=56, num_layers=28)) == 28
    assert layer_count(SimpleNamespace(num_hidden_layers=32)) == 32
    assert layer_count(SimpleNamespace(num_hidden_layers=32, num_layers=32)) == 32

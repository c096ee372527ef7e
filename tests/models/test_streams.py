# SPDX-License-Identifier: Apache-2.0
"""Taps of functions and methods that complete several streams and mix them, on mixes of one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.mixes import complete
from vllm_steer.models import streams
from vllm_steer.models.discovery import find_final_norm
from vllm_steer.models.self_check_plan import hops_of


def incomplete() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(5)
    return torch.randn(6, 8), torch.randn(6, 4, 8), torch.rand(6, 4, 1), torch.rand(6, 4, 4)


def mix(x: Any, residual: Any, post: Any, comb: Any, fn: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Complete the streams and return them with their sum, as the input of a sublayer."""
    whole = complete(x, residual, post, comb)
    return whole, whole.sum(1)


def tap(active: bool) -> Any:
    return SimpleNamespace(is_active=lambda: active, mean=lambda whole: whole.add_(10.0 if active else 0.0))


@pytest.mark.parametrize("active", [True, False])
def test_edits_complete_streams_once_in_front_of_the_mix(active: bool) -> None:
    """Catches an edit that the mix misses, one that runs twice, one of incomplete streams, and work in idle steps."""
    fn = nn.Parameter(torch.ones(1))
    setattr(fn, streams.TAPPED, (complete, tap(active)))
    given = incomplete()
    whole, read = streams.tap_streams(mix, *given, fn)
    expected = complete(*given) + (10.0 if active else 0.0)
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(read, expected.sum(1))


def mhc_post_tilelang(x: Any, residual: Any, post: Any, comb: Any) -> torch.Tensor:
    return complete(x, residual, post, comb)


class Fused(nn.Module):
    """A layer that completes the streams of the one before in a function of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.hc_attn_fn, self.hc_ffn_fn = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.ffn = nn.Identity()

    def forward(
        self, x: Any, positions: Any, ids: Any, post: Any = None, comb: Any = None, residual: Any = None
    ) -> Any:
        return x, residual, post, comb


@pytest.mark.parametrize("first", ["embedding", "streams", "incomplete"])
def test_taps_the_first_layer_of_a_model_and_of_a_stage(first: str) -> None:
    """Catches an edit that no tap makes at the first layer of a pipeline stage, which gets complete streams."""
    seen: list[str] = []

    class Recording:
        def __call__(self, target: Any) -> None:
            seen.append("embedding")

        def mean(self, whole: Any) -> None:
            seen.append("streams")

        def is_active(self) -> bool:
            return False

    layer: Any = Fused()
    streams.fused_functions(layer, {point: Recording() for point in ("pre_attn", "post_attn", "post_block")})  # type: ignore[misc]
    x, whole, post, comb = incomplete()
    if first == "incomplete":
        layer(x, None, None, post, comb, whole)
    else:
        layer(x if first == "embedding" else whole, None, None)
    assert seen == ([first] if first != "incomplete" else [])


def test_leaves_other_mixes_alone() -> None:
    """Catches an edit in a drafter, which calls the same functions with parameters of its own."""
    given = incomplete()
    whole, _ = streams.tap_streams(mix, *given, nn.Parameter(torch.ones(1)))
    assert torch.equal(whole, complete(*given))


def test_streams_that_end_in_a_mix_have_no_final_norm() -> None:
    """Catches a lens that norms the mean of streams, where the model norms a mix of its own."""
    layer = nn.Linear(1, 1)
    model = nn.Module()
    model.layers, model.norm = nn.ModuleList([layer]), nn.LayerNorm(1)
    for normed in (True, False):
        decoder: Any = SimpleNamespace(layers=[SimpleNamespace(module=layer, recipe=SimpleNamespace(normed=normed))])
        assert (find_final_norm(model, decoder) is model.norm) == normed


def test_no_hop_goes_through_a_layer_that_mixes_streams() -> None:
    """Catches a check at start that refuses such models, since one stream does not decide the next point."""
    sites: Any = [(point, layer) for layer in (0, 1) for point in ("pre_attn", "post_attn", "post_block")]
    assert {hop.source[1] for hop in hops_of(sites, (), (1,))} == {0}

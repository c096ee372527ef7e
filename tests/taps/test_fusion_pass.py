# SPDX-License-Identifier: Apache-2.0
"""Taps are joined where nothing can tell, and nowhere else; seen in what torch.compile makes of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import forward_context

from tests.taps.random_tables import NUM_SITES, random_tables
from vllm_steer.taps import fusion_pass
from vllm_steer.taps.fusion_pass import TapFusionPass, install_fusion_pass
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import CONTEXT_KEY, Tap

Taps = list[Tap]


def nothing_between(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x, y)
    taps[1](x, y)
    return x + y


def three_in_a_row(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    for tap in taps[:3]:
        tap(x, y)
    return x + y


def a_change_between(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x, y)
    x = x + 1
    taps[1](x, y)
    return x + y


def a_look_between(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    """What a loop does that hands hidden states to a drafter."""
    x = x * 2
    taps[0](x, y)
    seen = x + y
    taps[1](x, y)
    return x + y, seen


def another_summand(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x, y)
    taps[1](x, y + 1)
    return x + y


def alone_and_beside(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x)
    taps[1](x, y)
    return x + y


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sites each launch had."""
    launched: list[int] = []
    real = fusion_pass.fuse_taps

    def join(graph: Any) -> None:
        real(graph)
        nodes = [node for node in graph.nodes if node.op == "call_function" and "vllm_steer.tap" in str(node.args[:1])]
        launched.extend(1 if node.kwargs.get("second") is None else 2 for node in nodes)

    monkeypatch.setattr(fusion_pass, "fuse_taps", join)
    return launched


def compiled(model: Callable[..., Any], tables: Tables, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What the model gives as written, and compiled by inductor with the pass."""
    taps = [Tap(tables, site) for site in range(NUM_SITES)]
    context = SimpleNamespace(no_compile_layers={CONTEXT_KEY: tables})
    monkeypatch.setattr(forward_context, "_forward_context", context)
    tables.active_sites = (True,) * NUM_SITES
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(24, 64, generator=generator) for _ in range(2))
    torch._dynamo.reset()
    with torch._inductor.config.patch(  # type: ignore[attr-defined, unused-ignore]
        post_grad_custom_post_pass=TapFusionPass(), enable_auto_functionalized_v2=False, force_disable_caches=True
    ):
        got = torch.compile(lambda *summands: model(taps, *summands), fullgraph=True)(x, y)
    return model(taps, x, y), got


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nothing_between, [2]),
        (three_in_a_row, [2, 1]),
        (a_change_between, [1, 1]),
        (a_look_between, [1, 1]),
        (another_summand, [1, 1]),
        (alone_and_beside, [1, 1]),
    ],
)
def test_what_is_joined(
    model: Callable[..., Any], expected: list[int], launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a join across something that reads or changes the stream, and none where one is possible."""
    before, after = compiled(model, random_tables(2, 64, torch.device("cpu")), monkeypatch)
    assert launched == expected
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_the_comparison_sees_a_join_across_a_change(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the look at what comes between, the edit of the first site is another one."""

    def any_two(graph: Any) -> None:
        one, other = [node for node in graph.nodes if fusion_pass._is_single_tap(node)]
        other.kwargs = {**other.kwargs, "second": other.kwargs["head"], "head": one.kwargs["head"]}
        (edited,) = one.users
        edited.replace_all_uses_with(one.kwargs["target"])
        graph.erase_node(edited)
        graph.erase_node(one)

    monkeypatch.setattr(fusion_pass, "fuse_taps", any_two)
    before, after = compiled(a_look_between, random_tables(2, 64, torch.device("cpu")), monkeypatch)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_a_pass_that_the_user_set_runs_too() -> None:
    """Catches a pass that takes another's place, twice, or without it in the keys of compiled code."""
    ran: list[str] = []
    theirs = SimpleNamespace(uuid=lambda: "theirs")
    config = SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config={}))
    install_fusion_pass(config)
    (alone,) = config.compilation_config.inductor_compile_config.values()
    (key,) = config.compilation_config.inductor_compile_config
    config.compilation_config.inductor_compile_config[key] = _Ahead(ran, theirs.uuid())
    install_fusion_pass(config)
    install_fusion_pass(config)
    both = config.compilation_config.inductor_compile_config[key]
    both(torch.fx.Graph())
    assert ran == ["theirs"]
    assert alone.uuid() != both.uuid()


class _Ahead:
    def __init__(self, ran: list[str], name: str) -> None:
        self._ran, self._name = ran, name

    def __call__(self, graph: Any) -> None:
        self._ran.append(self._name)

    def uuid(self) -> str:
        return self._name

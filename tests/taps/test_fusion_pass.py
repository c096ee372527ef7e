# SPDX-License-Identifier: Apache-2.0
"""Fusion of adjacent taps in the graphs of torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes
from vllm import forward_context

from tests.taps.random_tables import NUM_SITES, random_tables
from vllm_steer.taps import fusion_pass
from vllm_steer.taps.fusion_pass import TapFusionPass, install_fusion_pass
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import CONTEXT_KEY, Tap

Taps = list[Tap]


def adjacent_taps(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x, y)
    taps[1](x, y)
    return x + y


def three_adjacent_taps(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    for tap in taps[:3]:
        tap(x, y)
    return x + y


def change_between_taps(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x, y)
    x = x + 1
    taps[1](x, y)
    return x + y


def read_between_taps(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Read the stream between two taps, as models that hand hidden states to a drafter do."""
    x = x * 2
    taps[0](x, y)
    seen = x + y
    taps[1](x, y)
    return x + y, seen


def different_second_summands(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x, y)
    taps[1](x, y + 1)
    return x + y


def two_and_one_summands(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x, y)
    taps[1](x)
    return x


def other_summand_read_between_taps(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x, y)
    seen = y * 3
    taps[1](x, y)
    return x + y, seen


def one_and_two_summands(taps: Taps, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x * 2
    taps[0](x)
    taps[1](x, y)
    return x + y


@pytest.fixture
def sites_per_launch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of sites of each launch."""
    sites_per_launch: list[int] = []
    real = fusion_pass.fuse_taps

    def fuse(graph: Any) -> None:
        real(graph)
        nodes = [node for node in graph.nodes if node.op == "call_function" and "vllm_steer.tap" in str(node.args[:1])]
        sites_per_launch.extend(1 if node.kwargs.get("second") is None else 2 for node in nodes)

    monkeypatch.setattr(fusion_pass, "fuse_taps", fuse)
    return sites_per_launch


def passes_only(graph: Any, inputs: Any, **settings: Any) -> Any:
    """Run Inductor's passes on a graph and none of its code generation, whose C++ compiler takes seconds."""
    post_grad_passes(graph, is_inference=True)
    graph.recompile()
    return graph


def run_eager_and_compiled(
    model: Callable[..., Any], tables: Tables, monkeypatch: pytest.MonkeyPatch, **backend: Any
) -> tuple[Any, Any]:
    """Return the outputs of the model, eager and compiled with the pass; without code generation by default."""
    backend = backend or {"backend": functools.partial(compile_fx, inner_compile=passes_only)}
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
        compiled = torch.compile(lambda *summands: model(taps, *summands), fullgraph=True, **backend)
        got = compiled(x.clone(), y.clone())
    return model(taps, x, y), got


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (adjacent_taps, [2]),
        (three_adjacent_taps, [2, 1]),
        (change_between_taps, [1, 1]),
        (read_between_taps, [1, 1]),
        (different_second_summands, [1, 1]),
        (one_and_two_summands, [1, 1]),
        (two_and_one_summands, [1, 1]),
        (other_summand_read_between_taps, [1, 1]),
    ],
)
def test_fuses_only_adjacent_taps(
    model: Callable[..., Any], expected: list[int], sites_per_launch: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a fusion across code that reads or changes the stream, and a missing fusion."""
    before, after = run_eager_and_compiled(model, random_tables(2, 64, torch.device("cpu")), monkeypatch)
    assert sites_per_launch == expected
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_generated_code_computes_the_same(sites_per_launch: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a graph with fused taps from which Inductor generates wrong code."""
    tables = random_tables(2, 64, torch.device("cpu"))
    before, after = run_eager_and_compiled(three_adjacent_taps, tables, monkeypatch, backend="inductor")
    assert sites_per_launch == [2, 1]
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_comparison_detects_a_wrong_fusion(sites_per_launch: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a pass that ignores code between the taps changes the output."""

    def any_two(graph: Any) -> None:
        one, other = [node for node in graph.nodes if fusion_pass._is_single_tap(node)]
        other.kwargs = {**other.kwargs, "second": other.kwargs["head"], "head": one.kwargs["head"]}
        for edited, name in zip(list(one.users), ("target", "other"), strict=True):
            edited.replace_all_uses_with(one.kwargs[name])
            graph.erase_node(edited)
        graph.erase_node(one)

    monkeypatch.setattr(fusion_pass, "fuse_taps", any_two)
    before, after = run_eager_and_compiled(read_between_taps, random_tables(2, 64, torch.device("cpu")), monkeypatch)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_keeps_the_pass_of_the_user() -> None:
    """Catches a user's pass that is replaced, runs twice, or is missing in the compile-cache key."""
    ran: list[str] = []
    theirs = SimpleNamespace(uuid=lambda: "theirs")
    config = SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config={}))
    install_fusion_pass(config)
    (alone,) = config.compilation_config.inductor_compile_config.values()
    (key,) = config.compilation_config.inductor_compile_config
    config.compilation_config.inductor_compile_config[key] = _UserPass(ran, theirs.uuid())
    install_fusion_pass(config)
    install_fusion_pass(config)
    both = config.compilation_config.inductor_compile_config[key]
    both(torch.fx.Graph())
    assert ran == ["theirs"]
    assert alone.uuid() != both.uuid()


class _UserPass:
    def __init__(self, ran: list[str], name: str) -> None:
        self._ran, self._name = ran, name

    def __call__(self, graph: Any) -> None:
        self._ran.append(self._name)

    def uuid(self) -> str:
        return self._name

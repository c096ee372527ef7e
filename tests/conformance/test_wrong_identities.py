# SPDX-License-Identifier: Apache-2.0
"""Negative controls of the identities: they reject late taps, half pairs, taps in other runs and behind norms.

One row for each new way in which taps are installed, and one for each family of layers that HF Transformers lacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance import identities, ngrams, proof
from tests.conformance.model import TinyModel
from tests.conformance.proof import prove_by_identities
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.selection import HAVE_IDENTITIES, is_changed, runs_here
from tests.conformance.shard import EVERYTHING, NEWEST, selected
from tests.conformance.test_wrong_taps import _half_pair_layer, _half_pair_mid, _half_parallel
from tests.conformance.ways import Way, ways
from tests.wrong_taps import late_layer, late_mid
from vllm_steer.models import convolved, discovery, install, streams
from vllm_steer.models.recipes import RECIPES
from vllm_steer.models.reduced_norm import TappedNorm
from vllm_steer.models.vllm_recipes import MODULES

ROWS = {tiny.name: tiny for tiny in HAVE_IDENTITIES}


def _late_norm(norm: TappedNorm, x: Any, residual: Any = None) -> Any:
    """Run the taps behind the norm, whose output was computed without the edit."""
    if residual is None:
        return norm._forward(x)
    norm._ran = True
    out, stream = norm._forward(x, residual)
    norm._stream(stream)
    return out, stream


def _half_norm(norm: TappedNorm, x: Any, residual: Any = None) -> Any:
    """Run the taps on the residual alone."""
    if residual is None:
        return norm._forward(x)
    norm._ran = True
    norm._stream(residual)
    return norm._forward(x, residual)


def _late_mix(owner: Any, name: str, tap: Any) -> None:
    """Run the tap behind the method, which mixed the streams without the edit."""
    method = getattr(owner, name)

    def late(first: Any, *others: Any, **more: Any) -> Any:
        out = method(first, *others, **more)
        tap(first)
        return out

    setattr(owner, name, late)


def _incomplete(function: Any, tap: Any, x: Any, residual: Any, post: Any, comb: Any) -> tuple[Any, Any, Any, Any]:
    """Run the tap on the streams without the output that the kernel adds."""
    tap.mean(residual)
    return x, residual, post, comb


def _late_fused(function: Any, x: Any, residual: Any, post: Any, comb: Any, fn: Any, *others: Any, **more: Any) -> Any:
    """Run the tap behind the function that completes and mixes, which mixed the streams without the edit."""
    out = function(x, residual, post, comb, fn, *others, **more)
    if (tapped := getattr(fn, streams.TAPPED, None)) is not None:
        tapped[1].mean(out[0])
    return out


_memories: list[tuple[Any, torch.Tensor]] = []
"""Taps behind memories that the next function of the layer runs, and the streams."""


def _late_memory(owner: Any, name: str, tap: Any) -> None:
    """Leave the tap behind a memory to :func:`_behind_the_mix`."""
    method = getattr(owner, name)

    def tapped(*args: Any, **kwargs: Any) -> Any:
        out = method(*args, **kwargs)
        _memories.append((tap, out))
        return out

    setattr(owner, name, tapped)


def _behind_the_mix(function: Any, *args: Any, **more: Any) -> Any:
    """Run the taps that were left, on streams that the mix for attention has read."""
    while _memories:
        tap, out = _memories.pop()
        tap(out)
    return _tap_streams(function, *args, **more)


def _no_memory(engram: Any, given: torch.Tensor, hashes: Any, keep: Any) -> torch.Tensor:
    """Leave the memory out of the formulas."""
    return given


_tap_streams = streams.tap_streams


def _late_unfused(layer: Any, taps: Any) -> None:
    """Run the taps behind the mixes of :func:`streams.unfused`."""
    mix = layer.module.hc_pre
    streams.unfused(layer.module, taps)

    def late(first: Any, fn: Any, *others: Any) -> Any:
        out = mix(first, fn, *others)
        (taps["post_attn"] if fn is layer.module.hc_ffn_fn else taps["pre_attn"]).mean(first)
        return out

    layer.module.hc_pre = late


def _incomplete_gated(mixer: Any, tap: Any) -> None:
    """Run the tap on the streams without the output that ``combine_and_mix`` adds."""
    for name in ("mix", "combine_and_mix"):
        _before_gated(mixer, name, tap)


def _before_gated(mixer: Any, name: str, tap: Any) -> None:
    method = getattr(mixer, name)

    def tapped(first: Any, *others: Any) -> Any:
        tap.mean(first.unflatten(-1, (mixer.hc_count, -1)))
        return method(first, *others)

    setattr(mixer, name, tapped)


def _unstored(layer: Any, taps: Any) -> None:
    """Run the taps of a running sum on one of its summands."""
    forward, norm = layer.forward, layer._post_attn_norm

    def mid(hidden_states: Any, residual: Any, prefix_sum: Any) -> Any:
        taps["post_attn"](hidden_states)
        return norm(hidden_states, residual, prefix_sum)

    def steered(*, hidden_states: Any, prefix_sum: Any, **others: Any) -> Any:
        taps["pre_attn"](prefix_sum)
        out = forward(hidden_states=hidden_states, prefix_sum=prefix_sum, **others)
        taps["post_block"](out[1])
        return out

    layer.forward, layer._post_attn_norm = steered, mid


def _late_sum(taps: Any, out: Any, stream: Any, norm: Any) -> Any:
    """Run the taps behind the norm, whose output was computed without the edit."""
    for tap in taps:
        tap(stream)
    return out


def _every_pass(now: Any, number: int, tap: Any) -> Any:
    return tap


def _other_pass(now: Any, number: int, tap: Any) -> Any:
    """Gate the tap by the other of two passes."""

    def gated(*summands: Any) -> None:
        if now._number == 1 - number:
            tap(*summands)

    return gated


@dataclass(frozen=True)
class Wrong:
    """Replacements of functions, and the points whose edits or values they spoil."""

    row: str
    how: str
    replaced: tuple[tuple[Any, str, Any], ...]
    spoiled: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.row}-{self.how}"

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the functions, and check no branches: the wrong taps are on the stream."""
        monkeypatch.setattr(proof, "supported_branches", lambda tiny: ())
        monkeypatch.setattr(identities, "supported_branches", lambda tiny: ())
        for owner, name, value in self.replaced:
            monkeypatch.setattr(owner, name, value)


def _late(row: str, shape: str, first: str = "input_layernorm") -> Wrong:
    makers = {f"_{shape}_layer": late_layer(shape, first), f"_{shape}_mid": late_mid(shape)}
    replaced = tuple((install, name, maker) for name, maker in makers.items())
    return Wrong(row, "late", replaced, ("pre_attn", "post_attn"))


def _half(row: str) -> Wrong:
    replaced = ((install, "_pair_layer", _half_pair_layer), (install, "_pair_mid", _half_pair_mid))
    return Wrong(row, "half", replaced, ("x_in", "x_mid"))


def _recipe(row: str, layer: str, spoiled: tuple[str, ...], **fields: Any) -> Wrong:
    """Return a control that installs the taps by another recipe."""
    wrong = {**RECIPES, MODULES + layer: replace(RECIPES[MODULES + layer], **fields)}
    return Wrong(row, "recipe", ((discovery, "RECIPES", wrong),), spoiled)


_PAIRS = (
    "decilm", "molmo", "molmo2", "interns1_pro", "ernie4_5_vl_moe", "solar", "bailing_moe_v3", "kimi_linear",
    "panguultramoe", "interns2_mobius", "domynedge",
)  # fmt: skip
_FIRST_NORMS = "input_layernorm|pre_attention_norm"
_NO_OPS = "input_layernorm|post_attention_layernorm"
"""Submodules that read the stream first, in blocks that may lack their attention."""
ALL = (
    *(_late(row, "pair", _FIRST_NORMS) for row in _PAIRS),
    *(_half(row) for row in _PAIRS),
    _late("decilm_no_ops", "pair", _NO_OPS),
    _half("decilm_no_ops"),
    _late("cosmos3_edge", "pair", "norm"),
    _half("cosmos3_edge"),
    _late("orion", "single"),
    _late("minicpm", "single"),
    _late("molmo_after", "single", "self_attn"),
    _late("molmo2_after", "single", "self_attn"),
    _late("cohere_asr", "single", "layer_norm_1"),
    _late("nemotron_parse", "single", "self_attn_layer_norm"),
    _late("nemotron_parse3_5", "single", "self_attn_layer_norm"),
    _recipe(
        "nemotron_parse3_5",
        "nemotron_parse3_5.MBartDecoderLayer",
        ("x_mid", "post_attn"),
        post_attn="self_attn_layer_norm",
    ),
    _recipe("domynedge", "domyn_edge.DomynEdgeDecoderLayer", ("x_in", "x_mid"), shape="single"),
    _late("whisper", "single", "self_attn_layer_norm"),
    _late("hrmtext_stacks", "single"),
    Wrong("moondream3", "late", ((install, "_single_layer", late_layer("single", "ln")),), ("pre_attn",)),
    Wrong("moondream3", "half", ((install, "_read_parallel", _half_parallel),), ("x_mid",)),
    Wrong(
        "zamba2",
        "late",
        ((install, "_single_layer", late_layer("single", "input_layernorm|mamba_decoder")),),
        ("pre_attn",),
    ),
    Wrong("iquestloopcoder", "late", ((install, "_single_mid", late_mid("single")),), ("post_attn",)),
    Wrong("iquestloopcoder", "every", ((install.Pass, "only_in", _every_pass),), ("pre_attn", "post_attn")),
    Wrong("iquestloopcoder", "other", ((install.Pass, "only_in", _other_pass),), ("x_in", "post_attn")),
    Wrong("deepseek_v32", "late", ((TappedNorm, "__call__", _late_norm),), ("post_attn",)),
    Wrong("deepseek_v32", "half", ((TappedNorm, "__call__", _half_norm),), ("x_in", "x_mid")),
    Wrong("hy_v4", "late", ((streams, "_before", _late_mix),), ("pre_attn", "post_attn")),
    Wrong("deepseek_v4", "half", ((streams, "_completed", _incomplete),), ("x_in", "x_mid")),
    Wrong("deepseek_v41", "half", ((streams, "_completed", _incomplete),), ("x_in", "x_mid")),
    Wrong("deepseek_v41", "late", ((streams, "tap_streams", _late_fused),), ("pre_attn", "post_attn")),
    Wrong("deepseek_v41_engram", "half", ((streams, "_after", streams._before),), ("x_in",)),
    Wrong(
        "deepseek_v41_engram",
        "late",
        ((streams, "_after", _late_memory), (streams, "tap_streams", _behind_the_mix)),
        ("pre_attn",),
    ),
    Wrong("deepseek_v41_engram", "absent", ((ngrams, "with_memory", _no_memory),), ("x_in", "pre_attn")),
    Wrong("deepseek_v4_cpu", "late", ((install, "_install", _late_unfused),), ("pre_attn", "post_attn")),
    Wrong("qwen4_exp", "half", ((streams, "_tap_gated", _incomplete_gated),), ("x_in", "x_mid")),
    Wrong("glm5_next", "half", ((streams, "_completed", _incomplete),), ("x_in", "x_mid")),
    Wrong("kimi_k3", "half", ((streams, "attention_residuals", _unstored),), ("x_in", "x_mid")),
    Wrong("minimax_m3", "late", ((TappedNorm, "__call__", _late_norm),), ("post_attn",)),
    Wrong("minimax_m3", "half", ((TappedNorm, "__call__", _half_norm),), ("x_in", "x_mid")),
    Wrong("glm_moe_dsa", "late", ((TappedNorm, "__call__", _late_norm),), ("post_attn",)),
    Wrong("inkling", "late", ((convolved, "_edit_and_norm", _late_sum),), ("pre_attn", "post_attn")),
)
IN_EVERY_RUN = ("deepseek_v32-late",)


def _chosen(wrong: Wrong) -> bool:
    row = ROWS[wrong.row]
    if NEWEST:
        return runs_here(row) and is_changed(row)
    return runs_here(row) and (EVERYTHING or str(wrong) in IN_EVERY_RUN or selected(str(wrong)))


CHOSEN = [wrong for wrong in ALL if _chosen(wrong)]


@pytest.mark.parametrize("wrong", CHOSEN, ids=str)
def test_rejects(
    wrong: Wrong, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches identities that accept taps in the wrong place, on one summand, or in another run of a layer."""
    wrong.put(monkeypatch)
    tiny = ROWS[wrong.row]
    problems = prove_by_identities(tiny, zoo_folder, reference_process).problems(tiny)
    for point in wrong.spoiled:
        assert [problem for problem in problems if point in problem], point


def _uncovered(rows: Iterable[TinyModel], controls: Iterable[Wrong]) -> dict[str, list[str]]:
    """Return what each row lacks: controls of its ways of installing, by how they spoil the taps."""
    covered: dict[Way, set[str]] = {}
    for wrong in controls:
        for way in ways(ROWS[wrong.row]):
            covered.setdefault(way, set()).add(wrong.how)
    lacking = {}
    for tiny in rows:
        missing = [way for way in ways(tiny) if way not in covered or not way.hows <= covered[way]]
        if missing and not tiny.gpu_only:
            lacking[tiny.name] = [str(way) for way in missing]
    return lacking


def test_every_way_of_installing_has_a_control() -> None:
    """Catches a row proven inside vLLM alone, in whose way of installing no wrong tap was ever rejected."""
    assert not _uncovered(HAVE_IDENTITIES, ALL)


def test_a_new_way_of_installing_needs_a_control() -> None:
    """Catches a coverage that any row satisfies: without its own controls each of these rows lacks one."""
    alone = ("kimi_linear", "cosmos3_edge", "deepseek_v4_cpu", "qwen4_exp", "interns2_mobius", "zamba2")
    for row in alone:
        assert row in _uncovered(HAVE_IDENTITIES, [wrong for wrong in ALL if wrong.row != row])
    for removed, rows in (
        ("kimi_linear-half", {"kimi_linear"}),
        ("moondream3-half", {"moondream3", "cohere_compass"}),
    ):
        others = [wrong for wrong in ALL if str(wrong) != removed]
        assert _uncovered(HAVE_IDENTITIES, others).keys() == rows

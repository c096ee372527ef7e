# SPDX-License-Identifier: Apache-2.0
"""Negative controls of the identities: they reject late taps, half pairs, taps in other runs and behind norms.

One row for each new way in which taps are installed, and one for each family of layers that HF Transformers lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import identities, proof
from tests.conformance.no_reference import NO_REFERENCE
from tests.conformance.part import EVERYTHING, selected
from tests.conformance.proof import prove_by_identities
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.test_wrong_taps import _half_pair_layer, _half_pair_mid
from tests.wrong_taps import late_layer, late_mid
from vllm_steer.models import convolved, install, streams
from vllm_steer.models.reduced_norm import TappedNorm

ROWS = {tiny.name: tiny for tiny in NO_REFERENCE}


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
    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...]
    spoiled: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.row}-{self.how}"


def _late(row: str, shape: str, first: str = "input_layernorm") -> Wrong:
    makers = {f"_{shape}_layer": late_layer(shape, first), f"_{shape}_mid": late_mid(shape)}
    replaced = tuple((install, name, maker) for name, maker in makers.items())
    return Wrong(row, "late", replaced, ("pre_attn", "post_attn"))


def _half(row: str) -> Wrong:
    replaced = ((install, "_pair_layer", _half_pair_layer), (install, "_pair_mid", _half_pair_mid))
    return Wrong(row, "half", replaced, ("x_in", "x_mid"))


_PAIRS = ("decilm", "molmo", "molmo2", "interns1_pro", "ernie4_5_vl_moe", "solar", "bailing_moe_v3")
ALL = (
    *(_late(row, "pair") for row in _PAIRS),
    *(_half(row) for row in _PAIRS),
    _late("molmo_after", "single", "self_attn"),
    _late("molmo2_after", "single", "self_attn"),
    _late("cohere_asr", "single", "layer_norm_1"),
    _late("nemotron_parse", "single", "self_attn_layer_norm"),
    _late("whisper", "single", "self_attn_layer_norm"),
    _late("hrmtext_stacks", "single"),
    Wrong("moondream3", "late", ((install, "_single_layer", late_layer("single", "ln")),), ("pre_attn",)),
    Wrong("iquestloopcoder", "late", ((install, "_single_mid", late_mid("single")),), ("post_attn",)),
    Wrong("iquestloopcoder", "every", ((install.Pass, "only_in", _every_pass),), ("pre_attn", "post_attn")),
    Wrong("iquestloopcoder", "other", ((install.Pass, "only_in", _other_pass),), ("x_in", "post_attn")),
    Wrong("deepseek_v32", "late", ((TappedNorm, "__call__", _late_norm),), ("post_attn",)),
    Wrong("deepseek_v32", "half", ((TappedNorm, "__call__", _half_norm),), ("x_in", "x_mid")),
    Wrong("hy_v4", "late", ((streams, "_before", _late_mix),), ("pre_attn", "post_attn")),
    Wrong("deepseek_v4", "half", ((streams, "_completed", _incomplete),), ("x_in", "x_mid")),
    Wrong("deepseek_v41", "half", ((streams, "_completed", _incomplete),), ("x_in", "x_mid")),
    Wrong("deepseek_v41", "late", ((streams, "tap_streams", _late_fused),), ("pre_attn", "post_attn")),
    Wrong("glm5_next", "half", ((streams, "_completed", _incomplete),), ("x_in", "x_mid")),
    Wrong("kimi_k3", "half", ((streams, "attention_residuals", _unstored),), ("x_in", "x_mid")),
    Wrong("minimax_m3", "late", ((TappedNorm, "__call__", _late_norm),), ("post_attn",)),
    Wrong("glm_moe_dsa", "late", ((TappedNorm, "__call__", _late_norm),), ("post_attn",)),
    Wrong("inkling", "late", ((convolved, "_edit_and_norm", _late_sum),), ("pre_attn", "post_attn")),
)
IN_EVERY_RUN = ("deepseek_v32-late",)
CHOSEN = [wrong for wrong in ALL if EVERYTHING or str(wrong) in IN_EVERY_RUN or selected(str(wrong))]


@pytest.mark.parametrize("wrong", CHOSEN, ids=str)
def test_rejects(
    wrong: Wrong, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches identities that accept taps in the wrong place, on one summand, or in another run of a layer."""
    # The wrong taps are on the stream, and so are the checks that have to find them.
    monkeypatch.setattr(proof, "supported_branches", lambda tiny: ())
    monkeypatch.setattr(identities, "supported_branches", lambda tiny: ())
    for owner, name, value in wrong.replaced:
        monkeypatch.setattr(owner, name, value)
    tiny = ROWS[wrong.row]
    problems = prove_by_identities(tiny, zoo_folder, reference_process).problems(tiny)
    for point in wrong.spoiled:
        assert [problem for problem in problems if point in problem], point

# SPDX-License-Identifier: Apache-2.0
"""Negative control: taps put in the usual wrong places must be told from right ones by the same comparison.

The seam is the four wrapper makers of ``vllm_steer.models.install``, which ``install_taps`` looks up by name: a test
puts a wrong one in the place of one of them. Each wrong tap reads the right value, so tests of values alone would let
it pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.cases import Case
from tests.conformance.edits import KINDS
from tests.conformance.parity import TOLERANCE, examine
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.zoo import BY_NAME

Forward = Callable[..., Any]


def _late_pair_mid(forward: Forward, post_attn: Any) -> Forward:
    """Behind the second norm: the residual that the norm hands on is the stream, but the MLP's input is made."""

    def steered(x: Any, residual: Any) -> Any:
        normed, residual = forward(x, residual)
        post_attn(residual)
        return normed, residual

    return steered


def _late_single_mid(forward: Forward, post_attn: Any) -> Forward:
    def steered(x: Any) -> Any:
        normed = forward(x)
        post_attn(x)
        return normed

    return steered


def _late_pair_layer(forward: Forward, pre_attn: Any, post_block: Any) -> Forward:
    """Behind the first norm: the attention's input is made."""
    norm = forward.__self__.input_layernorm  # type: ignore[attr-defined]
    in_time = norm.forward

    def late_norm(x: Any, residual: Any = None) -> Any:
        if residual is None:
            normed = in_time(x)
            pre_attn(x)
            return normed
        normed, residual = in_time(x, residual)
        pre_attn(residual)
        return normed, residual

    norm.forward = late_norm
    return _with_post_block(forward, lambda out: post_block(out[1], out[0]))


def _late_single_layer(forward: Forward, pre_attn: Any, post_block: Any) -> Forward:
    norm = forward.__self__.ln_1  # type: ignore[attr-defined]
    norm.forward = _late_single_mid(norm.forward, pre_attn)
    return _with_post_block(forward, post_block)


def _with_post_block(forward: Forward, post_block: Callable[[Any], None]) -> Forward:
    def steered(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        post_block(out)
        return out

    return steered


@dataclass(frozen=True)
class Wrong:
    """A wrong maker in the place of ``replaces``; it makes the edits of ``kinds`` at ``point`` wrong."""

    model: str
    replaces: str
    maker: Callable[..., Forward]
    point: str
    kinds: tuple[str, ...] = KINDS

    def __str__(self) -> str:
        return f"{self.model}-{self.maker.__name__.strip('_')}"

    def spoils(self, case: Case) -> bool:
        """Whether the case's edit comes out wrong."""
        return any(edit.point == self.point and edit.formula.kind in self.kinds for edit in case.edits)


WRONG = (
    Wrong("llama", "_pair_mid", _late_pair_mid, "post_attn"),
    Wrong("llama", "_pair_layer", _late_pair_layer, "pre_attn"),
    Wrong("gpt2", "_single_mid", _late_single_mid, "post_attn"),
    Wrong("gpt2", "_single_layer", _late_single_layer, "pre_attn"),
)


def _is_simple(case: Case) -> bool:
    return not case.edits or (len(case.edits) == 1 and case.edits[0].tokens == "all")


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_taps_in_the_usual_wrong_places_are_told_from_right_ones(
    wrong: Wrong, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches a comparison that would pass a wrong recipe: it must reject what is wrong, and only that."""
    from vllm_steer.models import install

    monkeypatch.setattr(install, wrong.replaces, wrong.maker)
    tiny = BY_NAME[wrong.model]
    report = examine(tiny, "eager", zoo_folder, reference_process, keep=_is_simple, with_branches=False)
    missed = [o.case.name for o in report.outcomes if wrong.spoils(o.case) and o.error < 10 * TOLERANCE]
    accused = [o.case.name for o in report.outcomes if not wrong.spoils(o.case) and not o.agrees]
    assert any(wrong.spoils(o.case) for o in report.outcomes)
    assert not missed
    assert not accused

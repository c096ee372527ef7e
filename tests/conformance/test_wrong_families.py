# SPDX-License-Identifier: Apache-2.0
"""Negative control on every family: taps one sublayer late, on one summand of two, and one layer off, are told from
right ones.

``test_wrong_taps.py`` has the single mistakes in detail; here all wrong taps of a family are put in at once. What one
summand is, by the shape in which the stream travels: of a pair, the residual, at every point (but in front of the
first layer, where there is no pair yet). In one tensor the stream is complete wherever it enters or leaves a block, and
has summands at ``post_attn`` alone: the attention branch is taken there. In parallel blocks that point is read only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.cases import Case
from tests.conformance.parity import TOLERANCE, Report, examine
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.selection import EVERYTHING
from tests.conformance.zoo import BY_NAME

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """A row, how its stream travels, the submodule that consumes it first, and (in one tensor) its attention branch.

    ``scaled``: the block multiplies the branch, so that even a vector added to it comes out wrong.
    """

    row: str
    shape: str
    first: str
    branch: str = ""
    scaled: bool = False

    def __str__(self) -> str:
        return self.row


FAMILIES = (
    Family("llama", "pair", "input_layernorm"),
    Family("gemma2", "pair", "input_layernorm"),
    Family("mamba2", "pair", "norm"),
    Family("gpt2", "single", "ln_1", "attn"),
    Family("exaone4", "single", "self_attn", "post_attention_layernorm"),
    Family("granite", "single", "input_layernorm", "self_attn", scaled=True),
    Family("cohere", "single", "input_layernorm"),
    Family("gpt_neox", "single", "input_layernorm"),
    Family("olmo2", "single", "self_attn", "post_attention_layernorm"),
)
IN_EVERY_RUN = ("llama", "gpt2", "cohere")
"""One of each shape; the half of the stream is taken on the others in ``make conformance``."""


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _late_layer(family: Family) -> Callable[..., Forward]:
    """Taps ``pre_attn`` behind what consumes the stream first: its output is made, the residual is edited."""

    def maker(forward: Forward, pre_attn: Any, post_block: Any) -> Forward:
        first = forward.__self__.get_submodule(family.first)  # type: ignore[attr-defined]
        in_time = first.forward

        def late(*args: Any, **kwargs: Any) -> Any:
            out = in_time(*args, **kwargs)
            residual = out[1] if family.shape == "pair" and len(args) > 1 else _stream(args, kwargs)
            pre_attn(residual)
            return out

        first.forward = late

        def steered(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if family.shape == "pair":
                post_block(out[1], out[0])
            else:
                post_block(out[0] if isinstance(out, tuple) else out)
            return out

        return steered

    return maker


def _late_mid(family: Family) -> Callable[..., Forward]:
    def maker(forward: Forward, post_attn: Any) -> Forward:
        def steered(x: Any, *args: Any, **kwargs: Any) -> Any:
            out = forward(x, *args, **kwargs)
            post_attn(out[1] if family.shape == "pair" else x)
            return out

        return steered

    return maker


def _half_pair_layer(forward: Forward, pre_attn: Any, post_block: Any) -> Forward:
    """The residual alone; in front of the first layer there is nothing else."""
    signature = inspect.signature(forward)

    def steered(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        residual = given.get("residual")
        pre_attn(given["hidden_states"] if residual is None else residual)
        out = forward(*args, **kwargs)
        post_block(out[1])
        return out

    return steered


def _half_pair_mid(forward: Forward, post_attn: Any) -> Forward:
    def steered(x: Any, residual: Any) -> Any:
        post_attn(residual)
        return forward(x, residual)

    return steered


def _half_single(family: Family) -> tuple[Callable[..., Forward], Callable[..., Forward]]:
    """Makers for a layer and its ``post_attn``, which is put on the attention branch before it is added."""
    from vllm_steer.models import install

    right, layers = install._single_layer, []

    def layer_maker(forward: Forward, pre_attn: Any, post_block: Any) -> Forward:
        layers.append(forward.__self__)  # type: ignore[attr-defined]
        return right(forward, pre_attn, post_block)

    def mid_maker(forward: Forward, post_attn: Any) -> Forward:
        branch = layers[-1].get_submodule(family.branch)
        attend = branch.forward

        def half(*args: Any, **kwargs: Any) -> Any:
            out = attend(*args, **kwargs)
            post_attn(out[0] if isinstance(out, tuple) else out)
            return out

        branch.forward = half
        return forward

    return layer_maker, mid_maker


def _half_branch(layer: Any, forward: Forward, recipe: Any, post_attn: Any) -> None:
    """The attention branch alone, without the stream to which it is added."""
    attention = getattr(layer, recipe.attn_out)
    attend = attention.forward

    def read(*args: Any, **kwargs: Any) -> Any:
        out = attend(*args, **kwargs)
        post_attn(recipe.attn_value(out))
        return out

    attention.forward = read


def _simple(case: Case) -> bool:
    return not case.edits or (len(case.edits) == 1 and case.edits[0].tokens == "all")


def _assert_told_apart(report: Report, spoils: Callable[[Case], bool]) -> None:
    assert any(spoils(outcome.case) for outcome in report.outcomes)
    missed = [o.case.name for o in report.outcomes if spoils(o.case) and o.error < 10 * TOLERANCE]
    accused = [o.case.name for o in report.outcomes if not spoils(o.case) and not o.agrees]
    assert not missed
    assert not accused


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_taps_one_sublayer_late_are_rejected(
    family: Family, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches a comparison that would pass a recipe whose edits come after the next sublayer's input was computed."""
    from vllm_steer.models import install

    tiny = BY_NAME[family.row]
    monkeypatch.setattr(install, f"_{family.shape}_layer", _late_layer(family))
    monkeypatch.setattr(install, f"_{family.shape}_mid", _late_mid(family))
    late = {"pre_attn"} if tiny.one_branch else {"pre_attn", "post_attn"} - set(tiny.refused)
    report = examine(tiny, "eager", zoo_folder, reference_process, keep=_simple, with_branches=False)
    _assert_told_apart(report, lambda case: bool(case.points & late))


@pytest.mark.parametrize("family", [f for f in FAMILIES if EVERYTHING or f.row in IN_EVERY_RUN], ids=str)
def test_one_summand_taken_for_the_stream_is_rejected(
    family: Family, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches a comparison that would pass half of the stream: a vector added to a half is right, the value is not, and
    nor is any edit that depends on it.
    """
    from vllm_steer.models import install

    tiny = BY_NAME[family.row]
    if family.shape == "pair":
        points = {"pre_attn", "post_attn", "post_block"}
        layer, mid = _half_pair_layer, _half_pair_mid
    else:
        points = {"post_attn"}
        layer, mid = _half_single(family)
    if tiny.refused:
        monkeypatch.setattr(install, "_read_parallel", _half_branch)
    else:
        monkeypatch.setattr(install, f"_{family.shape}_layer", layer)
        monkeypatch.setattr(install, f"_{family.shape}_mid", mid)

    def spoils(case: Case) -> bool:
        return any(
            edit.point in points - set(tiny.refused)
            and (family.scaled or edit.formula.kind != "add")
            and (edit.point, edit.layers) != ("pre_attn", 0)
            for edit in case.edits
        )

    report = examine(tiny, "eager", zoo_folder, reference_process, keep=_simple, with_branches=False)
    plain = [outcome for outcome in report.outcomes if not outcome.case.edits]
    for outcome in plain:
        wrong = {point for point, error in outcome.value_errors.items() if error > 100 * TOLERANCE}
        assert wrong == points
    if tiny.refused:
        assert all(outcome.agrees for outcome in report.outcomes)
    else:
        _assert_told_apart(report, spoils)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_taps_one_layer_off_are_rejected(
    family: Family, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches a comparison that would pass layers counted from another end or from one."""
    from vllm_steer.engine import model_setup

    right = model_setup.find_decoder

    def off_by_one(*args: Any, **kwargs: Any) -> Any:
        decoder = right(*args, **kwargs)
        numbers = [layer.number for layer in decoder.layers]
        shifted = [replace(layer, number=n) for layer, n in zip(decoder.layers, numbers[1:] + numbers[:1], strict=True)]
        return replace(decoder, layers=tuple(shifted))

    monkeypatch.setattr(model_setup, "find_decoder", off_by_one)
    report = examine(BY_NAME[family.row], "eager", zoo_folder, reference_process, keep=_simple, with_branches=False)
    _assert_told_apart(report, lambda case: any(edit.layers != "all" for edit in case.edits))

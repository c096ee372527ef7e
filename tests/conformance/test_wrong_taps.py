# SPDX-License-Identifier: Apache-2.0
"""Negative controls: the comparison rejects taps one sublayer late, on one summand only, or one layer off.

One summand, by the shape of the stream: in a pair, the residual alone, at every point (before the first layer there is
no pair yet). In a single tensor the stream is complete wherever it enters or leaves a block and has summands only at
``post_attn``, where the attention branch is taken. In parallel blocks that point can only be read.
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
from tests.conformance.shard import EVERYTHING, selected
from tests.conformance.zoo import BY_NAME
from tests.wrong_taps import Forward, late_layer, late_mid
from vllm_steer.engine import model_setup
from vllm_steer.models import install, streams


@dataclass(frozen=True)
class Family:
    """A row, the shape of its stream, the submodule that reads the stream first, and its attention branch.

    ``branch`` is for single tensors. ``scaled``: the block multiplies the branch, so even ``add`` on it is wrong.
    """

    row: str
    shape: str
    first: str
    branch: str = ""
    scaled: bool = False

    def __str__(self) -> str:
        return self.row


ALL_FAMILIES = (
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
"""One of each shape: a pair, a single tensor, a parallel block. The others rotate."""
FAMILIES = [family for family in ALL_FAMILIES if family.row in IN_EVERY_RUN or selected(family.row)]
ONE_SUMMAND_FAMILIES = [family for family in FAMILIES if family.row in IN_EVERY_RUN or EVERYTHING]
"""Families for the test of one summand; CONFORMANCE=all tries every family."""


def _half_pair_layer(forward: Forward, pre_attn: Any, post_block: Any, residual_at: int = 1) -> Forward:
    """Tap the residual alone; before the first layer there is nothing else."""
    signature = inspect.signature(forward)

    def steered(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        residual = given.get("residual")
        pre_attn(given["hidden_states"] if residual is None else residual)
        out = forward(*args, **kwargs)
        post_block(out[residual_at])
        return out

    return steered


def _half_pair_mid(forward: Forward, post_attn: Any) -> Forward:
    def steered(x: Any, residual: Any) -> Any:
        post_attn(residual)
        return forward(x, residual)

    return steered


def _half_single(family: Family) -> tuple[Callable[..., Forward], Callable[..., Forward]]:
    """Return makers for a layer and its ``post_attn``, which taps the attention branch before it is added."""
    right, layers = install._single_layer, []

    def layer_maker(forward: Forward, pre_attn: Any, post_block: Any) -> Forward:
        layers.append(forward.__self__)  # type: ignore[attr-defined]
        return right(forward, pre_attn, post_block)

    def mid_maker(forward: Forward, post_attn: Any) -> Forward:
        branch = layers[-1].get_submodule(family.branch)
        branch.forward = _tap_first(branch.forward, post_attn)
        return forward

    return layer_maker, mid_maker


def _half_parallel(layer: Any, forward: Forward, recipe: Any, post_attn: Any) -> None:
    """Read the attention branch alone, without the stream to which it is added."""
    attention = getattr(layer, recipe.attn_out)
    attention.forward = _tap_first(attention.forward, post_attn)


def _tap_first(forward: Forward, tap: Any) -> Forward:
    def half(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        tap(out[0] if isinstance(out, tuple) else out)
        return out

    return half


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture
def examined(family: Family, reference_process: ReferenceProcess, zoo_folder: Path) -> Callable[[], Report]:
    """Return a function that compares the family's row on its simple cases, with the taps as they are by then."""
    return lambda: examine(
        BY_NAME[family.row], "eager", zoo_folder, reference_process, keep=_is_simple, with_branches=False
    )


def _is_simple(case: Case) -> bool:
    return not case.edits or (len(case.edits) == 1 and case.edits[0].tokens == "all")


def _assert_rejects(report: Report, spoiled: Callable[[Case], bool]) -> None:
    """Assert that the comparison rejects the spoiled cases, and only these."""
    assert any(spoiled(outcome.case) for outcome in report.outcomes)
    accepted = [o.case.name for o in report.outcomes if spoiled(o.case) and o.error < 10 * TOLERANCE]
    rejected = [o.case.name for o in report.outcomes if not spoiled(o.case) and not o.agrees]
    assert not accepted
    assert not rejected


def test_rejects_taps_one_sublayer_late(
    family: Family, monkeypatch: pytest.MonkeyPatch, examined: Callable[[], Report]
) -> None:
    """Catches a comparison that accepts edits made after the next sublayer has computed its input."""
    tiny = BY_NAME[family.row]
    monkeypatch.setattr(install, f"_{family.shape}_layer", late_layer(family.shape, family.first))
    monkeypatch.setattr(install, f"_{family.shape}_mid", late_mid(family.shape))
    late = {"pre_attn"} if tiny.one_branch else {"pre_attn", "post_attn"} - set(tiny.refused)
    _assert_rejects(examined(), lambda case: bool(case.points & late))


@pytest.mark.parametrize("family", ONE_SUMMAND_FAMILIES, ids=str, indirect=True)
def test_rejects_one_summand(family: Family, monkeypatch: pytest.MonkeyPatch, examined: Callable[[], Report]) -> None:
    """Catches a comparison that accepts one summand of the stream.

    A vector added to one summand is right; the value is not, and neither is any edit that depends on it.
    """
    tiny = BY_NAME[family.row]
    if family.shape == "pair":
        points = {"pre_attn", "post_attn", "post_block"}
        layer, mid = _half_pair_layer, _half_pair_mid
    else:
        points = {"post_attn"}
        layer, mid = _half_single(family)
    if tiny.refused:
        monkeypatch.setattr(install, "_read_parallel", _half_parallel)
    else:
        monkeypatch.setattr(install, f"_{family.shape}_layer", layer)
        monkeypatch.setattr(install, f"_{family.shape}_mid", mid)

    def spoiled(case: Case) -> bool:
        return any(
            edit.point in points - set(tiny.refused)
            and (family.scaled or edit.formula.kind != "add")
            and (edit.point, edit.layers) != ("pre_attn", 0)
            for edit in case.edits
        )

    report = examined()
    for outcome in report.outcomes:
        if not outcome.case.edits:
            wrong = {point for point, error in outcome.value_errors.items() if error > 100 * TOLERANCE}
            assert wrong == points
    if tiny.refused:
        assert all(outcome.agrees for outcome in report.outcomes)
    else:
        _assert_rejects(report, spoiled)


def test_rejects_taps_one_layer_off(monkeypatch: pytest.MonkeyPatch, examined: Callable[[], Report]) -> None:
    """Catches a comparison that accepts layers counted from the other end or from one."""
    right = model_setup.find_decoder

    def off_by_one(*args: Any, **kwargs: Any) -> Any:
        decoder = right(*args, **kwargs)
        numbers = [layer.number for layer in decoder.layers]
        shifted = zip(decoder.layers, numbers[1:] + numbers[:1], strict=True)
        return replace(decoder, layers=tuple(replace(layer, number=number) for layer, number in shifted))

    monkeypatch.setattr(model_setup, "find_decoder", off_by_one)
    _assert_rejects(examined(), lambda case: any(edit.layers != "all" for edit in case.edits))


@pytest.mark.skipif(not selected("gemma3n"), reason="not in this part")
def test_rejects_late_taps_of_an_active_stream(
    monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches a comparison that accepts an edit behind the norm in front of the MLP, whose output misses it."""

    def late(owner: Any, name: str, tap: Any) -> None:
        method = getattr(owner, name)

        def tapped(x: Any, *others: Any) -> Any:
            out = method(x, *others)
            tap(x)
            return out

        setattr(owner, name, tapped)

    monkeypatch.setattr(streams, "_before", late)
    report = examine(BY_NAME["gemma3n"], "eager", zoo_folder, reference_process, keep=_is_simple, with_branches=False)
    _assert_rejects(report, lambda case: "post_attn" in case.points)

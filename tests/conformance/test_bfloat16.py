# SPDX-License-Identifier: Apache-2.0
"""Proof by ``identities.py`` in bfloat16, the dtype that these models are served in; other files have float32.

The identities hold up to the rounding of the stream, 2**-8 of its length. Late taps and half pairs are off by most of
an edit's effect, so they are rejected in bfloat16 too. Not here: rows that run in bfloat16 everywhere, and Gemma 3n,
which has no identities inside vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import identities, proof
from tests.conformance.model import TinyModel
from tests.conformance.no_reference import NO_REFERENCE
from tests.conformance.proof import prove_by_identities
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.shard import EVERYTHING, selected
from tests.conformance.test_wrong_identities import _half_norm, _late_norm
from tests.conformance.test_wrong_taps import _half_pair_layer, _half_pair_mid
from tests.conformance.zoo import ZOO
from tests.wrong_taps import late_layer, late_mid
from vllm_steer.models import install
from vllm_steer.models.reduced_norm import TappedNorm

NAMES = (
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "kimi_linear", "gpt_oss", "nemotron_h", "gemma4",
    "minimax_m3", "bailing_moe_v3",
)  # fmt: skip
ROWS = {
    tiny.name: replace(tiny, dtype="bfloat16", no_parity="it is compared with HF in float32")
    for tiny in (*ZOO, *NO_REFERENCE)
    if tiny.name in NAMES
}
CONTROLS: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
    "late": (
        (install, "_pair_layer", late_layer("pair", "input_layernorm")),
        (install, "_pair_mid", late_mid("pair")),
        (TappedNorm, "__call__", _late_norm),
    ),
    "half": (
        (install, "_pair_layer", _half_pair_layer),
        (install, "_pair_mid", _half_pair_mid),
        (TappedNorm, "__call__", _half_norm),
    ),
}
SPOILED = {"late": ("post_attn",), "half": ("x_in", "x_mid")}
REJECTED = tuple((row, how) for row in ("kimi_linear", "deepseek_v32", "glm4_moe") for how in CONTROLS)
"""Pairs, one with the reduction in the norms, and experts. The controls of the other ways are in float32."""


def _chosen(name: str) -> bool:
    return EVERYTHING or selected(f"{name}-bfloat16")


@pytest.mark.parametrize("name", [name for name in NAMES if _chosen(name)])
def test_values_and_causes(name: str, reference_process: ReferenceProcess, zoo_folder: Path) -> None:
    """Catches taps that round a row or an edit once more, and ones that are right in float32 only."""
    tiny: TinyModel = ROWS[name]
    found = prove_by_identities(tiny, zoo_folder, reference_process)
    problems = found.problems(tiny)
    assert not problems, "\n".join(problems)
    assert len([check for check in found.checks if check.effect is not None]) >= 20


@pytest.mark.parametrize(("name", "how"), [pair for pair in REJECTED if _chosen("-".join(pair))])
def test_rejects(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches tolerances for rounding that accept a tap in the wrong place or on one summand."""
    # The wrong taps are on the stream, and so are the checks that have to find them.
    monkeypatch.setattr(proof, "supported_branches", lambda tiny: ())
    monkeypatch.setattr(identities, "supported_branches", lambda tiny: ())
    for owner, attribute, value in CONTROLS[how]:
        monkeypatch.setattr(owner, attribute, value)
    problems = prove_by_identities(ROWS[name], zoo_folder, reference_process).problems(ROWS[name])
    for point in SPOILED[how]:
        assert [problem for problem in problems if point in problem], point
    if how == "late":
        assert len([problem for problem in problems if "by hooks" in problem]) >= 12

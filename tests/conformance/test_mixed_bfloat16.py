# SPDX-License-Identifier: Apache-2.0
"""Identities of models with several streams in bfloat16, beside kernels that round less than the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance import mixes, stand_ins
from tests.conformance.proof import MIXED_ROW_TOLERANCE, prove_by_identities
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.shard import EVERYTHING, selected
from tests.conformance.test_wrong_identities import ALL, ROWS

NAMES = ("deepseek_v4", "deepseek_v41", "glm5_next", "hy_v4", "kimi_k3", "inkling")
REJECTED = tuple(
    wrong for wrong in ALL
    if str(wrong) in ("deepseek_v4-half", "deepseek_v41-late", "glm5_next-half", "hy_v4-late", "kimi_k3-half",
                      "inkling-late")
)  # fmt: skip


def unrounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mix of completed streams that rounds the streams only when it returns them, as GPU kernels do."""

    def mix(x: Any, streams: Any, write: Any, between: Any, *others: Any, **more: Any) -> Any:
        found = function(x, streams.float(), write, between, *others, **more)
        return tuple(each.to(streams.dtype) if each.shape[-1:] == x.shape[-1:] else each for each in found)

    return mix


def unrounded_op() -> Callable[..., Any]:
    """Return the same for vLLM's operator."""

    def mix(*args: Any, **given: Any) -> Any:
        if args:
            return unrounded(mixes.fused)(*args, **given)
        dtype = given["residual"].dtype
        streams, write, between, x = mixes.fused_op(**{**given, "residual": given["residual"].float()})
        return streams.to(dtype), write, between, x.to(dtype)

    return mix


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stand_ins._OTHERS, "mhc_fused_post_pre_tilelang", unrounded(mixes.fused))
    monkeypatch.setitem(stand_ins._OTHERS, "MHCFusedPostPreOp", unrounded_op)
    monkeypatch.setattr(mixes, "fused_delayed", unrounded(mixes.fused_delayed))


@pytest.mark.parametrize("name", [name for name in NAMES if EVERYTHING or selected(f"{name}-bfloat16")])
def test_values_and_causes(name: str, reference_process: ReferenceProcess, zoo_folder: Path) -> None:
    """Catches criteria that refuse right taps beside kernels whose roundings differ from the formulas'."""
    tiny = replace(ROWS[name], dtype="bfloat16")
    problems = prove_by_identities(tiny, zoo_folder, reference_process).problems(tiny)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("wrong", [w for w in REJECTED if EVERYTHING or selected(f"{w}-bfloat16")], ids=str)
def test_rejects(
    wrong: Any, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches tolerances for rounding that accept late taps and incomplete streams."""
    wrong.put(monkeypatch)
    tiny = replace(ROWS[wrong.row], dtype="bfloat16")
    found = prove_by_identities(tiny, zoo_folder, reference_process)
    for point in wrong.spoiled:
        assert [problem for problem in found.problems(tiny) if point in problem], point
    values = [check.error for check in found.checks if check.effect is None]
    if wrong.how == "half":
        assert max(values) > 2 * MIXED_ROW_TOLERANCE
    assert torch.isfinite(torch.tensor(values)).all()

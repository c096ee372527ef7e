# SPDX-License-Identifier: Apache-2.0
"""Proof of the architectures that HF Transformers does not have, by ``identities.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.identities import Check
from tests.conformance.model import TinyModel
from tests.conformance.proof import Proof, prove_by_identities
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.selection import IDENTITIES


@pytest.fixture(scope="module", params=IDENTITIES, ids=str)
def proven(
    request: pytest.FixtureRequest, reference_process: ReferenceProcess, zoo_folder: Path
) -> tuple[TinyModel, Proof]:
    return request.param, prove_by_identities(request.param, zoo_folder, reference_process)


def test_values_and_causes(proven: tuple[TinyModel, Proof]) -> None:
    """Catches a tap on the wrong side of a sublayer, on one summand, or off by one layer.

    Also catches edits without effect and a row that proves another class than it claims.
    """
    tiny, proof = proven
    problems = proof.problems(tiny)
    assert not problems, "\n".join(problems)
    assert len([check for check in proof.checks if check.effect is not None]) >= 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_proof_reports_each_problem(dtype: str) -> None:
    """Catches criteria that no evidence can fail.

    Each of these must be reported by itself: a wrong row, a late edit, an edit without effect, another class and, in
    bfloat16, rows that are far from HF's, a weak edit that is late, and one that is a little off at most tokens.
    """
    tiny = TinyModel("made_up", "x", {}, "FUSED", "Layer", dtype=dtype)
    sound = Proof("A", "identities inside vLLM", ("Layer",), (Check("row", 1e-6), Check("edit", 1e-6, 1.0)), 0.01)
    assert sound.problems(tiny) == []
    wrong = [
        replace(sound, checks=(Check("row", 0.1), Check("edit", 1e-6, 1.0))),
        replace(sound, checks=(Check("row", 1e-6), Check("edit", 0.6, 1.0), *[Check("edit", 1e-6, 1.0)] * 2)),
        replace(sound, checks=(Check("row", 1e-6), Check("edit", 1e-9, 1e-3))),
        replace(sound, checks=(Check("row", float("nan")), Check("edit", 1e-6, 1.0))),
        replace(sound, layers=("Other",)),
    ]
    for proof in wrong:
        assert len(proof.problems(tiny)) == 1
    far = replace(sound, hf_value=0.5)
    strong = Check("edit", 1e-6, 1.0, (1e-6, 1.0))
    weak_late = replace(sound, checks=(Check("row", 1e-6), strong, Check("edit", 0.06, 0.1, (0.01, 0.015))))
    off = replace(sound, checks=(Check("row", 1e-6), strong, Check("edit", 0.9, 1.0, (0.03, 1.0))))
    spilled = replace(sound, checks=(Check("row", 1e-6), strong, Check("edit", 0.9, 1.0, (0.01, 1.0))))
    found = [len(proof.problems(tiny)) for proof in (far, weak_late, off, spilled)]
    assert found == ([1, 1, 1, 0] if dtype == "bfloat16" else [0, 1, 1, 1])


@pytest.mark.parametrize(("row", "missed", "problems"), [(0.1, 0.08, 0), (0.2, 0.08, 1), (0.1, 0.2, 1)])
def test_quantised_mixes(row: float, missed: float, problems: int) -> None:
    """Catches limits for several streams with quantised weights that accept any row or any late edit."""
    tiny = TinyModel("made_up", "x", {}, "HYPER-CONNECTIONS", "Layer", dtype="bfloat16")
    checks = (Check("row", row), Check("edit", 1.0, 1.0, (1e-6, 1.0)), Check("edit", 1.0, 1.0, (missed, 0.3)))
    assert len(Proof("A", "identities inside vLLM", ("Layer",), checks).problems(tiny, 0.45)) == problems

# SPDX-License-Identifier: Apache-2.0
"""Architectures that HF Transformers does not have: values and causes inside vLLM (``identities.py`` says how)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.identities import Check
from tests.conformance.model import TinyModel
from tests.conformance.proof import Proof, prove_inside
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.selection import INSIDE


@pytest.fixture(scope="module", params=INSIDE, ids=str)
def proven(
    request: pytest.FixtureRequest, reference_process: ReferenceProcess, zoo_folder: Path
) -> tuple[TinyModel, Proof]:
    return request.param, prove_inside(request.param, zoo_folder, reference_process)


def test_values_and_causes(proven: tuple[TinyModel, Proof]) -> None:
    """Catches a tap on the wrong side of a sublayer, on one summand of two, or off by one layer; weights under which an
    engine that does nothing would pass; and a row that proves another class than it says.
    """
    tiny, proof = proven
    problems = proof.problems(tiny)
    assert not problems, "\n".join(problems)
    assert len([check for check in proof.checks if check.effect is not None]) >= 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_proof_that_fails_says_so(dtype: str) -> None:
    """Catches criteria that nothing can miss: a wrong row, an edit that comes late, one without effect, another class
    and, in bfloat16, numbers that are not HF's, each by itself.
    """
    tiny = TinyModel("made_up", "x", {}, "FUSED", "Layer", dtype=dtype)
    sound = Proof("A", "identities inside vLLM", ("Layer",), (Check("row", 1e-6), Check("edit", 1e-6, 1.0)), 0.01)
    assert sound.problems(tiny) == []
    wrong = [
        replace(sound, checks=(Check("row", 0.1), Check("edit", 1e-6, 1.0))),
        replace(sound, checks=(Check("row", 1e-6), Check("edit", 0.5, 1.0), *[Check("edit", 1e-6, 1.0)] * 2)),
        replace(sound, checks=(Check("row", 1e-6), Check("edit", 1e-9, 1e-3))),
        replace(sound, checks=(Check("row", float("nan")), Check("edit", 1e-6, 1.0))),
        replace(sound, layers=("Other",)),
    ]
    for proof in wrong:
        assert len(proof.problems(tiny)) == 1
    far = replace(sound, hf_value=0.5)
    usually_late = replace(sound, checks=(Check("row", 1e-6), Check("edit", 0.2, 1.0)))
    assert [len(proof.problems(tiny)) for proof in (far, usually_late)] == ([1, 1] if dtype == "bfloat16" else [0, 1])

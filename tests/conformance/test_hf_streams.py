# SPDX-License-Identifier: Apache-2.0
"""The definitions of docs/reference/streams.md against HF Transformers' layers, which are independent of vLLM's.

Not here: DeepSeek V4.1 and Kimi K3, which Transformers does not have.
"""

from __future__ import annotations

import pytest

from tests.conformance.hf_families import FAMILIES
from tests.conformance.hf_streams import Difference, Fault, compare
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.shard import EVERYTHING, selected

TOLERANCE = 1e-5
"""Largest relative difference of two float32 runs of the same formula."""
MIN_EFFECT = 0.1
"""Least change of the final hidden state that an edit has to make, and that a wrong formula has to miss."""
SEVERAL = tuple(name for name, family in FAMILIES.items() if family.streams)
MIXING = ("DeepSeek V4", "GLM 5 Next")
"""Families whose streams mix with each other."""


def _chosen(name: str) -> bool:
    return EVERYTHING or selected(FAMILIES[name].tiny.name)


def _compare(process: ReferenceProcess, name: str, fault: Fault | None = None) -> list[Difference]:
    if not _chosen(name):
        pytest.skip("belongs to another part")
    found: list[Difference] = process.run(compare, name, fault)
    return found


def _edits(found: list[Difference], *points: str) -> list[Difference]:
    return [each for each in found if each.effect is not None and each.name.split()[2] in points]


@pytest.mark.parametrize("name", FAMILIES)
def test_formulas_agree_with_hf(name: str, reference_process: ReferenceProcess) -> None:
    """Catches a formula of ours that misreads a family in the same way as our taps of vLLM's layers."""
    found = _compare(reference_process, name)
    wrong = [each for each in found if not each.error < TOLERANCE]
    assert not wrong, wrong
    effects = [each.effect for each in found if each.effect is not None]
    assert len(effects) == 16
    assert min(effects) > MIN_EFFECT
    assert len(found) - len(effects) == 17 + (name in SEVERAL)


@pytest.mark.parametrize("name", FAMILIES)
def test_rejects_edits_behind_a_sublayer(name: str, reference_process: ReferenceProcess) -> None:
    """Catches a comparison that accepts an edit that attention or the MLP does not read, whose rows are right."""
    found = _compare(reference_process, name, "late")
    assert all(each.error < TOLERANCE for each in found if each.effect is None)
    late = _edits(found, "pre_attn", "post_attn")
    assert len(late) == 8
    assert min(each.error for each in late) > MIN_EFFECT


@pytest.mark.parametrize("name", SEVERAL)
def test_rejects_an_edit_of_one_stream(name: str, reference_process: ReferenceProcess) -> None:
    """Catches a comparison that accepts an edit of a single stream as one of all of them."""
    found = _compare(reference_process, name, "one stream")
    assert all(each.error < TOLERANCE for each in found if each.effect is None)
    edits = _edits(found, "pre_attn", "post_attn", "post_block")
    assert len(edits) == 12
    assert min(each.error for each in edits) > MIN_EFFECT


@pytest.mark.parametrize(("name", "fault"), [*((name, "transposed") for name in MIXING), ("Inkling", "unconvolved")])
def test_rejects_wrong_rows(name: str, fault: Fault, reference_process: ReferenceProcess) -> None:
    """Catches streams that mix in the wrong direction, and branches that are added without their convolution."""
    found = _compare(reference_process, name, fault)
    assert max(each.error for each in found if each.effect is None) > MIN_EFFECT
    assert min(each.error for each in _edits(found, "pre_attn", "post_attn")) > MIN_EFFECT

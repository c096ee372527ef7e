# SPDX-License-Identifier: Apache-2.0
"""Every edit at every served point of every architecture gives what the same edit gives in HF Transformers.

One engine per architecture and mode, and all of its requests in one batch. What is compared, and how closely, is in
``parity.py``; the requests are in ``cases.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.branches import BRANCHES, served_branches
from tests.conformance.engine import MODES
from tests.conformance.parity import MIN_EFFECT, TOLERANCE, Report, examine
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.selection import AGAINST_HF, FAMILIES
from tests.conformance.zoo import BY_NAME

STEERED = [tiny.name for tiny in AGAINST_HF]
# One for each way in which taps meet compiled code: two summands, a sandwich norm between them, one tensor, and
# HF's own layers. The other families go through Dynamo alone, at a fifth of the time.
COMPILED = ["llama", "gemma2", "gpt2", "gpt_neox"]
NAMES_OF_MODE = {
    "eager": STEERED,
    "traced": [name for name in STEERED if name in FAMILIES and name not in COMPILED],
    "compiled": COMPILED,
}
RUNS = [
    pytest.param((name, mode), id=f"{name}-{mode}", marks=pytest.mark.slow if mode == "compiled" else ())
    for mode in MODES
    for name in NAMES_OF_MODE[mode]
]


@pytest.fixture(scope="module", params=RUNS)
def report(request: pytest.FixtureRequest, reference_process: ReferenceProcess, zoo_folder: Path) -> Report:
    """What one architecture did in one mode."""
    name, mode = request.param
    return examine(BY_NAME[name], mode, zoo_folder, reference_process)


@pytest.mark.feature("`torch.compile`", "steer")
def test_edits_give_what_the_same_edits_give_in_transformers(report: Report) -> None:
    """Catches an edit that is one sublayer late, at the wrong tokens, on half of the stream, or of another request."""
    wrong = [f"{o.case.name}: off by {o.error:.1e}" for o in report.outcomes if o.case.edits and not o.agrees]
    assert not wrong, "\n".join(wrong)


@pytest.mark.feature("`torch.compile`", "capture")
def test_captured_rows_are_the_streams_of_transformers(report: Report) -> None:
    """Catches a row of another token, layer or point, and one read on the wrong side of an edit: every point, layer,
    prompt and generated token of every request, under its own edits; where a point cannot be edited, too.
    """
    seen = set()
    for outcome in report.outcomes:
        for point, error in outcome.value_errors.items():
            seen.add(point)
            assert error < TOLERANCE, f"{outcome.case.name}, {point}: off by {error:.1e}"
    stream = {"pre_attn", "post_attn", "post_block"} - set(report.tiny.unread)
    assert seen == {*stream, *served_branches(report.tiny)}


def test_plain_requests_in_the_batch_are_untouched(report: Report) -> None:
    """Catches an edit that leaks to the requests beside it."""
    assert report.worst_plain < TOLERANCE


def test_every_edit_changes_the_answer_by_far_more_than_the_tolerance(report: Report) -> None:
    """Catches cases that an engine which does nothing would pass."""
    weak = [f"{o.case.name}: {o.effect:.1e}" for o in report.outcomes if o.case.edits and o.effect < MIN_EFFECT]
    assert not weak, "\n".join(weak)


def test_each_served_point_was_edited(report: Report) -> None:
    """Catches a list of cases that has lost a point."""
    edited = set().union(*(outcome.case.points for outcome in report.outcomes))
    assert edited == {"pre_attn", "post_attn", "post_block", *served_branches(report.tiny)} - set(report.tiny.refused)
    refused = {refusal.point for refusal in report.refusals}
    assert refused == {*report.tiny.refused, *BRANCHES} - edited


def test_refused_points_are_errors_with_the_reason(report: Report) -> None:
    """Catches a point that is accepted and ignored, and a refusal that leaves half a batch in the engine."""
    for refusal in report.refusals:
        assert refusal.error is not None, f"{refusal.point} was accepted"
        assert refusal.point in refusal.error
        assert any(layer in refusal.error for layer in report.tiny.layers)
    # Alone in its batch a request meets other kernels: 1.2e-4 was seen on a CPU without AMX.
    assert report.after_refusal.error < 10 * TOLERANCE


def test_the_taps_are_on_the_layer_class_that_the_zoo_names(report: Report) -> None:
    """Catches a row that proves another class than it says, as after a change of vLLM's registry."""
    assert report.layers == report.tiny.layers

# SPDX-License-Identifier: Apache-2.0
"""Every edit at every served point of every architecture gives what the same edit gives in HF Transformers.

One engine per architecture and mode, and all of its requests in one batch. What is compared, and how closely, is in
``parity.py``; the requests are in ``cases.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.engine import MODES, running
from tests.conformance.parity import MIN_EFFECT, TOLERANCE, Report, examine
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.zoo import BY_NAME, ZOO

STEERED = [tiny.name for tiny in ZOO if tiny.steered]
# One for each way in which taps meet compiled code: two summands, a sandwich norm between them, one tensor, and
# HF's own layers. All the others go through Dynamo alone, at a fifth of the time.
COMPILED = ["llama", "gemma2", "gpt2", "gpt_neox"]
NAMES_OF_MODE = {
    "eager": STEERED,
    "traced": [name for name in STEERED if name not in COMPILED],
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


def test_edits_give_what_the_same_edits_give_in_transformers(report: Report) -> None:
    """Catches an edit that is one sublayer late, at the wrong tokens, on half of the stream, or of another request."""
    wrong = [f"{o.case.name}: off by {o.error:.1e}" for o in report.outcomes if o.case.edits and not o.agrees]
    assert not wrong, "\n".join(wrong)


def test_captured_rows_are_the_streams_of_transformers(report: Report) -> None:
    """Catches a row of another token, layer or point, and one read on the wrong side of an edit: every point, layer,
    prompt and generated token of every request, under its own edits.
    """
    seen = set()
    for outcome in report.outcomes:
        for point, error in outcome.value_errors.items():
            seen.add(point)
            assert error < TOLERANCE, f"{outcome.case.name}, {point}: off by {error:.1e}"
    assert seen == {"pre_attn", "post_attn", "post_block"} - set(report.tiny.refused)


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
    assert edited == {"pre_attn", "post_attn", "post_block"} - set(report.tiny.refused)


def test_refused_points_are_errors_with_the_reason(report: Report) -> None:
    """Catches a point that is accepted and ignored, and a refusal that leaves half a batch in the engine."""
    for refusal in report.refusals:
        assert refusal.error is not None, f"{refusal.point} was accepted"
        assert refusal.point in refusal.error
        assert report.tiny.layer in refusal.error
    assert report.after_refusal.agrees


def test_the_taps_are_on_the_layer_class_that_the_zoo_names(report: Report) -> None:
    """Catches a row that proves another class than it says, as after a change of vLLM's registry."""
    assert report.layers == {report.tiny.layer}


@pytest.mark.parametrize("name", [tiny.name for tiny in ZOO if not tiny.steered])
def test_a_model_without_a_proven_recipe_is_refused_at_the_start(
    name: str, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches an engine that starts on a layer class or variant that nobody has proven, and steers it wrongly."""
    tiny = BY_NAME[name]
    path = reference_process.save(name, zoo_folder)
    with pytest.raises(ValueError, match=f"cannot be steered.*{tiny.layer}"), running(tiny, path, "eager"):
        pytest.fail("the engine started")

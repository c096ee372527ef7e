# SPDX-License-Identifier: Apache-2.0
"""Studies on a model that can be computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patching.fake import FakeRunner
from vllm_steer import SteeringError
from vllm_steer.patching import PatchingResult, PatchingStudy, sweep
from vllm_steer.patching.sources import resampled
from vllm_steer.request.edit import KINDS

pytestmark = pytest.mark.skipif("replace" not in KINDS, reason="needs the edit replace")

PROMPTS = {"clean": "the red car is", "corrupt": "the blue bus is", "answer": " red", "foil": " blue"}


def study(runner: FakeRunner | None = None, **changes: Any) -> PatchingStudy:
    return PatchingStudy(runner or FakeRunner(), **{**PROMPTS, **changes})


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_only_the_patched_position_matters(direction: str) -> None:
    """Catches a source one position off, a patch of the wrong run, and a metric of the wrong sign."""
    result = study().sweep(metric="recovered", direction=direction, progress=False)
    moved = np.array([0.0, 1.0, 0.0, 0.0])
    expected = moved if direction == "denoising" else 1 - moved
    np.testing.assert_allclose(result.grid("post_block"), np.tile(expected, (2, 1)), atol=1e-6)
    assert result.noise_floor() == 0 and result.control() < 1e-6
    np.testing.assert_array_equal(result.below_floor("post_block")[0], [True, False, True, True])


def test_failed_cells_are_missing(tmp_path: Path) -> None:
    """Catches a failed cell that carries the baseline's value, and one that is not run again when a sweep continues."""
    runner, file = FakeRunner(), tmp_path / "study.safetensors"
    runner.fail = lambda request: "no room" if request.edits and request.edits[0].tokens.to_wire() == [1] else None
    result = study(runner).sweep(file=file, progress=False)
    assert np.isnan(result.grid("post_block")[:, 1]).all() and not np.isnan(result.grid("post_block")[:, 2]).any()
    assert [each["error"] for each in result.failed()] == ["no room"] * 2
    assert "no room" in result.to_html()
    runner = FakeRunner()
    continued = study(runner).sweep(file=file, progress=False)
    assert not np.isnan(continued.grid("post_block")).any() and not continued.errors
    assert sum(1 for request in runner.requests if request.edits) == 2
    loaded = PatchingResult.load(file)
    np.testing.assert_array_equal(loaded.grid("post_block"), continued.grid("post_block"))
    assert loaded.info == continued.info
    with pytest.raises(SteeringError, match="another sweep"):
        study(foil=" slow").sweep(file=file, progress=False)


def test_recovered_needs_a_difference() -> None:
    """Catches a raw grid under the name of `recovered`."""
    with pytest.raises(SteeringError, match=r"clean - corrupt"):
        study(corrupt="the red bus is").sweep(metric="recovered", progress=False)


def test_metrics_of_one_sweep() -> None:
    """Catches a metric that another sweep would be needed for, and `kl` that is not zero at the clean run."""
    result = study().sweep(kl_tokens=8, progress=False)
    logprob, kl = result.grid("post_block", "logprob"), result.grid("post_block", "kl")
    assert logprob.dtype == np.float32 and logprob[0, 1] > logprob[0, 0]
    assert 0 < kl[0, 1] < kl[0, 0] == pytest.approx(float(result.corrupt[0, 2]))
    assert result.clean[0, 2] == pytest.approx(0, abs=1e-9)
    with pytest.raises(SteeringError, match="kl"):
        study().sweep(progress=False).grid("post_block", "kl")


def test_pairs() -> None:
    """Catches statistics over cells in place of pairs, and pairs whose grids do not fit together."""
    pairs = [
        ("the red car is", "the blue bus is", " red", " blue"),
        ("the fast car is", "the slow bus is", " fast", " slow"),
    ]
    result = PatchingStudy(FakeRunner(), pairs=pairs).sweep(progress=False)
    stats = result.statistics("post_block")
    assert stats.pairs == 2 and stats.effect.shape == (2, 4) and stats.p_value[0, 1] == 0.5
    assert len(result.records()) == 8
    with pytest.raises(SteeringError, match="aligned positions"):
        PatchingStudy(FakeRunner(), pairs=[*pairs, ("the red", "the blue", " red", " blue")]).sweep(progress=False)


def test_noise_and_ablation() -> None:
    """Catches noise at other tokens or without a seed, and an ablation that is compared with a corrupt run."""
    given = {"clean": "the red car is", "corrupt": None, "noise": 3.0, "subject": "red", "draws": 3}
    results = [study(**given, seed=seed).sweep(progress=False) for seed in (0, 0, 1)]
    assert len(results[0].corrupt) == 3 and len({tuple(row[:2]) for row in results[0].corrupt.tolist()}) == 3
    np.testing.assert_array_equal(results[0].corrupt, results[1].corrupt)
    assert not np.array_equal(results[0].corrupt[:, :2], results[2].corrupt[:, :2])
    np.testing.assert_allclose(
        results[0].grid("post_block")[0, 1],
        results[0].clean[0, 0] - results[0].clean[0, 1],
        atol=1e-5,
    )
    ablated = study(corrupt=None, ablate="zero").sweep(progress=False)
    assert ablated.info.direction == "ablation"
    np.testing.assert_array_equal(np.abs(ablated.effect("post_block")[0]) > 1e-6, [False, True, False, False])
    with pytest.raises(SteeringError, match="corrupt run"):
        ablated.grid("post_block", "recovered")


def test_coarse_to_fine(tmp_path: Path) -> None:
    """Catches cells outside of the blocks that are run, or that look like cells without effect."""
    spans: dict[str, Any] = {"position_span": 2, "layer_span": 2, "file": tmp_path / "a.safetensors", "progress": False}
    result = study().coarse_to_fine(**spans)
    grid = result.grid("post_block")
    assert not np.isnan(grid[:, :2]).any() and np.isnan(grid[:, 2:]).all()
    assert len(result.not_run) == 4 and all("below" in each for each in result.not_run.values()) and not result.failed()
    assert PatchingResult.load(spans["file"]).not_run == result.not_run
    assert not study().coarse_to_fine(keep=0.0, **spans).not_run
    assert not study().coarse_to_fine(**spans).not_run, "the file has their values"


@pytest.mark.parametrize("method", ["sweep", "coarse_to_fine"])
def test_a_file_that_cannot_be_used_is_refused_before_the_cells(tmp_path: Path, method: str) -> None:
    """Catches a study that is lost because its file cannot be written, or is that of another sweep."""
    (other := tmp_path / "other.safetensors").touch()
    study(foil=" slow").sweep(file=tmp_path / "new.safetensors", progress=False).save(other)
    for file, problem in (
        (tmp_path / "none" / "study.safetensors", "does not exist"),
        (tmp_path, "is a folder"),
        ("", "is a folder"),
        (other, "another sweep"),
    ):
        runner = FakeRunner()
        with pytest.raises(SteeringError, match=problem):
            getattr(study(runner), method)(file=file, progress=False)
        assert not any(request.edits for request in runner.requests), file


def test_plot_and_tables(tmp_path: Path) -> None:
    """Catches pictures and tables that fail on a missing cell."""
    runner = FakeRunner()
    runner.fail = lambda request: "<b>" if request.edits and request.edits[0].layers == (1,) else None
    result = study(runner).sweep(points=["pre_attn", "post_block"], progress=False)
    result.plot(tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert "<b>" not in result.to_html() and "&lt;b&gt;" in result.to_html()
    assert {each["error"] for each in result.records()} == {None, "<b>"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"answer": None}, "answer"),
        ({"foil": " red"}, "foil"),
        ({"corrupt": [99]}, r"corrupt\[0\]"),
        ({"clean": []}, "clean"),
        ({"pairs": []}, "pairs"),
    ],
)
def test_bad_studies_are_refused(changes: dict[str, Any], field: str) -> None:
    """Catches prompts and answers that cannot be scored."""
    with pytest.raises(SteeringError, match=field):
        study(**changes)


def moved(result: PatchingResult, **more: Any) -> list[bool]:
    effects: list[bool] = (np.abs(result.effect("post_block", **more)[0]) > 1e-5).tolist()
    return effects


def test_windows_strength_and_spans() -> None:
    """Catches a window that patches its centre only, a strength that is ignored, and a span of the wrong tokens."""
    runner = FakeRunner()
    result = study(runner).sweep(position_window=3, layer_window=2, progress=False)
    assert moved(result) == [True, True, True, False]
    # The row of layer 1 patches layer 0 too; its name has both.
    assert result.info.row_names == ("0", "1 (0-1)")
    patched = next(request for request in runner.requests if request.edits and len(request.tokens) == 4)
    assert {edit.layers for edit in patched.edits} <= {(0,), (1,)} and patched.edits[0].tokens.num_positions in (2, 3)
    half, whole = (study().sweep(strength=s, progress=False).effect("post_block")[0, 1] for s in (0.5, 1.0))
    assert 0 < half < whole
    spans = study().sweep(positions=[{"span": "blue"}, [2, 4], -1], progress=False)
    assert spans.info.column_names == ("1  blue", "2-3  bus is", "3  is") and moved(spans) == [True, False, False]


def test_answers_may_be_one_token_id() -> None:
    """Catches the id of an answer refused, or read as a text."""
    grids = [study(answer=answer, foil=foil).sweep(progress=False).grid("post_block") for answer, foil in (
        (" red", " blue"), (1, 2), ([1], np.int64(2)),
    )]  # fmt: skip
    np.testing.assert_array_equal(grids[0], grids[1])
    np.testing.assert_array_equal(grids[0], grids[2])
    for wrong in (8, -1, True, 1.0):
        with pytest.raises(SteeringError, match="answer"):
            study(answer=wrong)
    with pytest.raises(SteeringError, match="clean: must be a text or a list of token ids, not 1"):
        study(clean=1)


def test_sources_of_ablations() -> None:
    """Catches a mean over the wrong tokens, and rows that are resampled from the prompt itself or another position."""
    given = {"corrupt": None, "reference": ["the blue bus is", "the slow car is"]}
    runner = FakeRunner()
    study(runner, **given, ablate="mean").sweep(positions=[1], progress=False)
    expected = np.mean([runner.rows(runner.encode(text, True), ()) for text in given["reference"]], axis=(0, 1))
    edit = next(request.edits[0] for request in runner.requests if request.edits)
    np.testing.assert_allclose(edit.vector, expected, atol=1e-6)
    runner = FakeRunner()
    result = study(runner, **given, ablate="resample", draws=4, seed=1).sweep(positions=[1], progress=False)
    rows = {int(edit.vector.argmax()) for request in runner.requests for edit in request.edits}
    assert rows == {2, 7, 1} and len(result.clean) == 4  # blue and slow, and red of the control
    with pytest.raises(SteeringError, match="no prompt other than"):
        study(corrupt=None, ablate="resample").sweep(progress=False)
    longer = resampled({("post_block", 1): np.eye(3, dtype=np.float32)}, 6)
    assert longer.rows("post_block", 1, [1, 2, 3, 5]).argmax(axis=1).tolist() == [1, 2, 2, 2]


def test_a_random_subspace_beside_the_real_one() -> None:
    """Catches a control that changes rows by another norm, in the same subspace, or that is missing in the result."""
    runner = FakeRunner()
    directions = np.zeros((1, 8), np.float32)
    directions[0, 1], directions[0, 2] = 1, -1  # red minus blue
    result = study(runner).sweep(subspace=directions, metric="recovered", positions=[1], progress=False)
    np.testing.assert_allclose(result.grid("post_block"), 1, atol=1e-5)
    control = result.grid("post_block", random=True)
    assert np.abs(control - 1).min() > 0.2 and result.random_control() == pytest.approx(np.abs(control).max(), rel=1e-5)
    tokens = runner.encode("the blue bus is", True)
    changes = []
    for request in runner.requests:
        if request.edits and request.edits[0].subspace is not None:
            change = (runner.rows(tokens, request.edits) - runner.rows(tokens, ()))[1]
            changes.append(float(np.linalg.norm(change)))
    assert len(changes) == 4 and np.allclose(changes, np.sqrt(2), atol=1e-4)
    assert runner.reserved[0] == 4
    with pytest.raises(SteeringError, match="random"):
        study().sweep(subspace=directions, control=False, progress=False).grid("post_block", random=True)


def test_random_controls_that_failed_are_run_again(tmp_path: Path) -> None:
    """Catches a continued study whose controls stay missing, and without the reason."""
    runner, directions = FakeRunner(), np.eye(2, 8, dtype=np.float32)
    arguments: dict[str, Any] = {"file": tmp_path / "a.safetensors", "subspace": directions, "progress": False}
    runner.fail = lambda request: (
        "no room" if any(not np.array_equal(edit.subspace, directions) for edit in request.edits) else None
    )
    first = study(runner).sweep(**arguments)
    assert set(first.control_errors.values()) == {"no room"} and not first.errors
    assert np.isnan(first.grid("post_block", random=True)).all() and not np.isnan(first.grid("post_block")).any()
    continued = study().sweep(**arguments)
    assert not np.isnan(continued.grid("post_block", random=True)).any() and not continued.control_errors


def test_normalised_values_within_the_noise_are_missing(tmp_path: Path) -> None:
    """Catches `recovered` that divides by a distance which is smaller than the noise floor."""
    runner = FakeRunner()
    cells = 8
    runner.noise = lambda request: 5.0 if len(runner.requests) > cells and not request.edits else 0.0
    result = study(runner).sweep(metric="recovered", progress=False)
    assert np.isnan(result.grid("post_block")).all() and not np.isnan(result.grid("post_block", "logit_diff")).any()
    (pair,) = result.too_close()
    assert abs(pair["clean"] - pair["corrupt"]) < pair["noise_floor"]
    result.plot(tmp_path / "out.png")
    assert (
        result.to_html(tmp_path / "out.html") == (tmp_path / "out.html").read_text() and "recovered" in result.to_html()
    )
    assert result.to_html(metric="logit_diff") != result.to_html()
    with pytest.raises(TypeError, match="metric='logit_diff'"):  # a file of this name, with the grids of another metric
        result.to_html("logit_diff")


def test_prompts_of_different_lengths() -> None:
    """Catches rows that are taken from the same number instead of the aligned position, and a skipped one that runs."""
    runner = FakeRunner()
    result = study(runner, clean="the red car is", corrupt="the blue fast bus is").sweep(progress=False)
    pair = result.info.pairs[0]
    assert pair.skipped == (1, 2, 3) and [start for start, _ in pair.columns] == [0, 4]
    given = study(runner, corrupt="the blue fast bus is", alignment=[(1, 1), (2, 3)]).sweep(progress=False)
    assert given.info.pairs[0].skipped == (0, 2, 4)
    sources = {
        (request.edits[0].tokens.to_wire()[0], int(request.edits[0].vector.argmax()))
        for request in runner.requests
        if request.edits and request.edits[0].vector.ndim == 1
    }
    assert {(1, 1), (3, 3)} <= sources  # red at 1, car at 3
    with pytest.raises(SteeringError, match=r"position 2 .* has no aligned .*pair \(there, 2\) to"):
        study(corrupt="the blue fast bus is").sweep(positions=[2], progress=False)
    with pytest.raises(SteeringError, match=r"no aligned positions; .* such as \[\(0, 0\), \(3, 6\)"):
        study(corrupt="blue fast bus").sweep(progress=False)


def test_a_metric_of_the_user() -> None:
    """Catches a callable that is given other numbers than the run's, and a sweep that continues with another one."""

    def chance(logprobs: Any) -> float:
        return float(np.exp(logprobs.answer))

    result = study().sweep(metric=chance, kl_tokens=8, progress=False)
    np.testing.assert_allclose(result.grid("post_block"), np.exp(result.grid("post_block", "logprob")), rtol=1e-5)


def test_a_sweep_continues_only_with_the_same_model_and_metric(tmp_path: Path) -> None:
    """Catches cells of two models, or of two callables, in one grid."""
    file, other = tmp_path / "study.safetensors", FakeRunner()
    study().sweep(metric=lambda logprobs: logprobs.answer, file=file, progress=False)
    with pytest.raises(SteeringError, match="differ by"):
        study().sweep(metric=lambda logprobs: 100 * logprobs.answer, file=file, progress=False)
    other.noise = lambda request: 2.0
    with pytest.raises(SteeringError, match="differ by"):
        study(other).sweep(metric=lambda logprobs: logprobs.answer, file=file, progress=False)


def test_answers_of_several_tokens_are_scored_as_sequences() -> None:
    """Catches a cell whose later tokens are scored without the earlier ones, or without the patch."""
    runner = FakeRunner()
    result = study(runner, answer=" red car", foil=" blue").sweep(positions=[1], progress=False)
    rows = runner.rows(runner.encode("the red car is", True), ())
    edits = next(request.edits for request in runner.requests if request.edits)
    base = runner.encode("the blue bus is", True)
    expected = runner.logprobs(base, edits)[1] + runner.logprobs([*base, 1], edits)[3]
    assert result.grid("post_block", "logprob")[0, 0] == pytest.approx(expected, abs=1e-5)
    assert np.array_equal(edits[0].vector, rows[1])


def test_progress_is_shown_apart_from_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a bar that is written to the program's output, or that fails on cells without values."""
    runner = FakeRunner()
    runner.fail = lambda request: "no room" if request.edits and request.edits[0].layers == (1,) else None
    result = study(runner).sweep(progress=True)
    assert len(result.failed()) == 4 and capsys.readouterr().out == ""


class CancelledError(Exception):
    """Raised by the runner of a cancelled study."""


@pytest.mark.parametrize("stage", ["edits", "scores"])
def test_a_cancelled_study_does_no_more_work(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a study that prepares or measures all cells of a batch after its client has gone."""
    runner, work, left = FakeRunner(), list[Any](), [3]

    def check() -> None:
        if work:
            left[0] -= 1
            if not left[0]:
                raise CancelledError

    def counted(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            work.append(None)
            return original(*args, **kwargs)

        return run

    name = {"edits": "cell_edits", "scores": "_measured"}[stage]
    monkeypatch.setattr(sweep, name, counted(getattr(sweep, name)))
    runner.check = check  # type: ignore[method-assign]
    study = PatchingStudy(runner, clean="the red car is", corrupt="the blue car is", answer=" fast", foil=" slow")
    with pytest.raises(CancelledError):
        study.sweep(points="post_block", metric="logit_diff")
    assert 1 <= len(work) <= 3

# SPDX-License-Identifier: Apache-2.0
"""Studies on a model that can be computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patching.fake import FakeRunner
from vllm_steer import SteeringError
from vllm_steer.patching import PatchingResult, PatchingStudy
from vllm_steer.spec.edit import KINDS

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


def test_coarse_to_fine() -> None:
    """Catches cells outside of the blocks that are run, or that look like cells without effect."""
    runner = FakeRunner()
    result = study(runner).coarse_to_fine(position_span=2, layer_span=2, progress=False)
    grid = result.grid("post_block")
    assert not np.isnan(grid[:, :2]).any() and np.isnan(grid[:, 2:]).all()
    assert all("below" in each["error"] for each in result.failed())


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

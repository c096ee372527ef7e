# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compute what their definitions say, for random instruction sequences."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.taps import two_summands
from tests.taps.infinite import wrong_rows
from tests.taps.random_tables import compare, compare_fused
from vllm_steer.taps.reference import apply_tap
from vllm_steer.taps.tables import Tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tables", ["first", pytest.param("others", marks=pytest.mark.slow)])
def test_kernels_match_their_definitions_in_the_interpreter(tables: str) -> None:
    """Catches wrong arithmetic, masks or links. Runs in a new process, since Triton reads its switch at import."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.taps.kernel_in_interpreter", tables],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_comparison_detects_skipped_instructions() -> None:
    """Negative control: a launch that ignores links is far outside of the tolerance."""

    def first_only(target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, tables: Tables) -> None:
        links = tables.instruction[:, 2].clone()
        tables.instruction[:, 2] = 0
        apply_tap(target, other, head, tables)
        tables.instruction[:, 2] = links

    with pytest.raises(AssertionError, match="arena"):
        compare(first_only, 0, 64, torch.float32, True, torch.device("cpu"))


def test_comparison_detects_a_wrong_strength() -> None:
    """Negative control: edits of half the strength are far outside of the tolerance."""

    def half(target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, tables: Tables) -> None:
        tables.parameter[:, 0] *= 0.5
        apply_tap(target, other, head, tables)
        tables.parameter[:, 0] *= 2.0

    assert compare(half, 0, 64, torch.float32, True, torch.device("cpu")) > 1000


def wrong_fusion(wrong: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Return a launch of two sites whose second site starts from ``wrong(before, after)`` of the first."""

    def launch(
        target: torch.Tensor,
        other: torch.Tensor | None,
        head: torch.Tensor,
        tables: Tables,
        second: torch.Tensor | None = None,
    ) -> None:
        before = target.clone()
        apply_tap(target, other, head, tables)
        if second is not None:
            target.copy_(wrong(before, target))
            apply_tap(target, other, second, tables)

    return launch


def test_comparison_detects_wrong_fused_launches() -> None:
    """Negative controls: a second site that misses the first edit or rounds it differently."""
    drawn = (0, 64, torch.float16, True, torch.device("cpu"))
    assert compare_fused(wrong_fusion(lambda before, after: after), *drawn) == ""
    assert compare_fused(wrong_fusion(lambda before, after: before), *drawn) != ""
    assert compare_fused(wrong_fusion(lambda before, after: after.bfloat16().half()), *drawn) != ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 896, 4096, 5120, 32768])
def test_tap_kernel_matches_the_definition_on_the_gpu(dtype: torch.dtype, hidden: int) -> None:
    """Catches differences of the compiled kernel."""
    from vllm_steer.taps.tap_kernel import launch_tap

    for seed in range(3):
        for with_other in (False, True):
            drawn = (seed, hidden, dtype, with_other, torch.device("cuda"))
            assert compare(launch_tap, *drawn) < 64
            assert compare_fused(launch_tap, *drawn) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("with_other", [False, True])
def test_tap_kernel_leaves_infinite_values_unchanged_on_the_gpu(with_other: bool) -> None:
    """Catches tokens that no edit covers and that are written, so that infinity becomes NaN."""
    from vllm_steer.taps.tap_kernel import launch_tap

    assert wrong_rows(launch_tap, with_other, torch.device("cuda")) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tap_kernel_reports_what_the_model_goes_on_with_on_the_gpu(dtype: torch.dtype) -> None:
    """Catches a compiler that removes the rounding of a value that is read."""
    from vllm_steer.taps.tap_kernel import launch_tap

    assert two_summands.wrong_rows(launch_tap, dtype, torch.device("cuda")) == ""


@pytest.mark.gpu
def test_assignment_kernels_match_their_definitions_on_the_gpu() -> None:
    """Catches a neighbour's segment, off-by-one boundaries, padding with a row, and overlapping arena offsets."""
    from tests.taps.random_batches import compare_rows

    assert [said for seed in range(30) if (said := compare_rows(seed, torch.device("cuda")))] == []
    assert compare_rows(0, torch.device("cuda"), max_requests=60, max_tokens=400) == ""

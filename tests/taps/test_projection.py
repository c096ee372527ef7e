# SPDX-License-Identifier: Apache-2.0
"""Projections of captured rows: the definition, and the kernel on a GPU. ``test_tap_kernel.py`` runs it interpreted."""

from __future__ import annotations

import pytest
import torch

from tests.taps.random_projections import MAX_ERROR, SIZES, max_error
from vllm_steer.taps import projection as module
from vllm_steer.taps import projection_kernel
from vllm_steer.taps.projection_kernel import launch_products

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k", "hidden"), [(1, 1, 64), (5, 3, 96), (7, 2, 45), (300, 4, 256), (0, 3, 64)])
def test_products_equal_float64_products(
    n: int, k: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches pieces of ``hidden`` that are dropped or mismatched, rounding to the rows' dtype, and reordered parts."""
    rows, directions = torch.randn(n, hidden).to(dtype), torch.randn(k, hidden)
    right = rows.double() @ directions.double().T
    for few, most in ((1 << 18, 4096), (-1, 4096), (1 << 18, 4)):
        monkeypatch.setattr(module, "_FEW_RESULTS", few)
        monkeypatch.setattr(module, "_MOST_ROWS", most)
        found = module.products(rows, directions)
        assert (found.shape, found.dtype) == ((n, k), torch.float32)
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)


def thirds(directions: torch.Tensor) -> list[torch.Tensor]:
    """Return the three bfloat16 parts of a direction as the kernel computes them."""
    found = []
    for _ in range(3):
        high = (directions.view(torch.int32) & -(1 << 16)).view(torch.float32)
        found.append(high)
        directions = directions - high
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("picked", [False, True])
def test_comparison_detects_inexact_products(size: tuple[int, int, int], picked: bool) -> None:
    """Negative controls of the comparison.

    These are directions without their last part, rounded instead of truncated parts (which turn the largest directions
    infinite), other rows than requested, and a missing column.
    """
    assert max_error(module.products_at, size, picked, CPU) < MAX_ERROR

    def two_thirds(stored: torch.Tensor, places: torch.Tensor | None, directions: torch.Tensor) -> torch.Tensor:
        high, middle, _ = thirds(directions)
        return module.products_at(stored, places, high + middle)

    def rounded(stored: torch.Tensor, places: torch.Tensor | None, directions: torch.Tensor) -> torch.Tensor:
        return module.products_at(stored, places, directions.bfloat16().float())

    def beside(stored: torch.Tensor, places: torch.Tensor | None, directions: torch.Tensor) -> torch.Tensor:
        return module.products_at(stored.roll(1, 0) if len(stored) > 1 else stored * 2, places, directions)

    def narrow(stored: torch.Tensor, places: torch.Tensor | None, directions: torch.Tensor) -> torch.Tensor:
        return module.products_at(stored[:, 1:], places, directions[:, 1:])

    for wrong in (two_thirds, rounded, beside, narrow):
        assert max_error(wrong, size, picked, CPU) > MAX_ERROR, wrong.__name__


def test_three_bfloat16_parts_are_exact() -> None:
    """Catches inexact parts of a direction. Only numbers too small for a third bfloat16 part may differ."""
    directions = torch.randn(1000) * 10.0 ** torch.linspace(-30, 37, 1000)
    parts = thirds(directions)
    assert all(torch.equal(part, part.bfloat16().float()) for part in parts)
    assert torch.equal(sum(part.double() for part in parts), directions.double())


def test_large_products_use_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches partial sums that need more memory than vLLM leaves, and launches with an empty grid."""
    monkeypatch.setattr(projection_kernel, "_MOST_SUMS", 4 * 7 * 3)
    rows, directions = torch.randn(8, 1024).bfloat16(), torch.randn(3, 1024)
    monkeypatch.setattr(projection_kernel, "_products_kernel", None)
    assert torch.equal(launch_products(rows, None, directions), module.products(rows, directions))
    assert launch_products(rows[:0], None, directions).shape == (0, 3)
    with pytest.raises(TypeError):
        launch_products(rows[:7], None, directions)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "right"),
    [
        ("cuda", torch.bfloat16, (8, 0), True),
        ("cuda", torch.bfloat16, (9, 0), True),
        ("cuda", torch.bfloat16, (7, 5), False),
        ("cuda", torch.float16, (9, 0), False),
        ("cuda", torch.float32, (9, 0), False),
        ("cpu", torch.bfloat16, (9, 0), False),
    ],
)
def test_is_supported(
    device: str, dtype: torch.dtype, capability: tuple[int, int], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a kernel that interprets rows of another dtype as bfloat16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert projection_kernel.is_supported(torch.device(device), dtype) is right


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES, (1024, 16, 4096), (300, 64, 8192), (4, 5, 5376)])
@pytest.mark.parametrize("picked", [False, True])
def test_kernel_matches_the_definition_on_the_gpu(size: tuple[int, int, int], picked: bool) -> None:
    """Catches what the interpreter cannot show: rounding tensor cores and wrong fragment layouts."""
    assert max_error(launch_products, size, picked, torch.device("cuda")) < MAX_ERROR

# SPDX-License-Identifier: Apache-2.0
"""Products of captured rows with directions: the definition, and the kernel against it.

The kernel runs in the interpreter in ``test_kernel.py``.
"""

from __future__ import annotations

import pytest
import torch

from tests.taps.random_projections import OFF_BY, SIZES, off_by
from vllm_steer.taps import projection as module
from vllm_steer.taps import projection_kernel
from vllm_steer.taps.projection_kernel import launch_products

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k", "hidden"), [(1, 1, 64), (5, 3, 96), (7, 2, 45), (300, 4, 256), (0, 3, 64)])
def test_products_are_those_of_the_definition(
    n: int, k: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches pieces of ``hidden`` left out or paired with others, a width that does not divide, rounding to the rows'
    dtype, and parts of many rows in another order; in pieces and in one."""
    rows, directions = torch.randn(n, hidden).to(dtype), torch.randn(k, hidden)
    right = rows.double() @ directions.double().T
    for few, most in ((1 << 18, 4096), (-1, 4096), (1 << 18, 4)):
        monkeypatch.setattr(module, "_FEW_RESULTS", few)
        monkeypatch.setattr(module, "_MOST_ROWS", most)
        found = module.products(rows, directions)
        assert (found.shape, found.dtype) == ((n, k), torch.float32)
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)


def thirds(directions: torch.Tensor) -> list[torch.Tensor]:
    """As the kernel cuts them."""
    found = []
    for _ in range(3):
        high = (directions.view(torch.int32) & -(1 << 16)).view(torch.float32)
        found.append(high)
        directions = directions - high
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("picked", [False, True])
def test_the_comparison_takes_the_definition_and_nothing_less(size: tuple[int, int, int], picked: bool) -> None:
    """Negative control: directions without their last third, rounded in place of cut off (which makes the largest ones
    infinite), rows beside those that were asked for, and a column left out."""
    assert off_by(module.products_at, size, picked, CPU) < OFF_BY

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
        assert off_by(wrong, size, picked, CPU) > OFF_BY, wrong.__name__


def test_thirds_are_the_direction() -> None:
    """What the kernel's accuracy rests on: three bfloat16 numbers are a float32 number, to the bit, but for numbers so
    small that bfloat16 has no third of them."""
    directions = torch.randn(1000) * 10.0 ** torch.linspace(-30, 37, 1000)
    parts = thirds(directions)
    assert all(torch.equal(part, part.bfloat16().float()) for part in parts)
    assert torch.equal(sum(part.double() for part in parts), directions.double())


def test_many_products_take_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches sums of pieces that take memory which vLLM has not left, and an empty launch."""
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
def test_what_the_kernel_serves(
    device: str, dtype: torch.dtype, capability: tuple[int, int], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows whose bits would be multiplied as those of another dtype."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert projection_kernel.is_supported(torch.device(device), dtype) is right


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES, (1024, 16, 4096), (300, 64, 8192), (4, 5, 5376)])
@pytest.mark.parametrize("picked", [False, True])
def test_the_kernel_on_a_gpu(size: tuple[int, int, int], picked: bool) -> None:
    """Catches what the interpreter cannot: tensor cores that round, and layouts of fragments."""
    assert off_by(launch_products, size, picked, torch.device("cuda")) < OFF_BY

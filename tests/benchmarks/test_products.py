# SPDX-License-Identifier: Apache-2.0
"""Tests that the methods of benchmarks.products agree and compile for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import products
from tests.taps.compiled import Compiled
from vllm_steer.taps import projection_kernel

ROOT = Path(__file__).parents[2]


def test_all_methods_agree() -> None:
    """Catches a method that is fast because it omits part of the work."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.products", "--check"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("hidden", [64, 4096])
def test_detects_rounded_directions(hidden: int) -> None:
    """Negative control: rounds the directions as tensor cores would, and omits a column."""
    rows, directions = torch.randn(40, hidden).bfloat16(), torch.randn(5, hidden)
    rounded = ((directions.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    assert products.relative_error(rows.float() @ directions.T, rows, directions) < products.MAX_ERROR
    for wrong in (rows.float() @ rounded.T, rows[:, 1:].float() @ directions[:, 1:].T):
        assert products.relative_error(wrong, rows, directions) > products.MAX_ERROR


@pytest.mark.parametrize("by_column", [False, True])
def test_the_kernel_compiles(monkeypatch: pytest.MonkeyPatch, by_column: bool) -> None:
    """Catches a kernel that does not compile on a GPU."""
    found = Compiled(products.float_kernel, 90)
    monkeypatch.setattr(products, "float_kernel", found)
    directions = torch.zeros(3, 256)
    products.by_float_kernel(products.FLOAT_SHAPES[0], by_column)(
        torch.zeros(5, 256, dtype=torch.bfloat16), directions.T.contiguous() if by_column else directions
    )
    assert len(found.sizes) == 1


def test_all_kernel_shapes_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a shape with which the engine's kernel does not compile."""
    found = Compiled(projection_kernel._products_kernel, 90)
    monkeypatch.setattr(projection_kernel, "_products_kernel", found)
    for shape in products.SHAPES:
        products.launch_products(torch.zeros(5, 256, dtype=torch.bfloat16), None, torch.zeros(3, 256), shape)
    assert len(found.sizes) == len(products.SHAPES)

# SPDX-License-Identifier: Apache-2.0
"""Kernels compile to machine code for GPUs that are not present.

The interpreter accepts code that the compiler rejects, such as a variable that changes its type in a loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from tests.taps.compiled import Compiled
from vllm_steer.config import SteeringConfig
from vllm_steer.taps import assignment_kernel, projection_kernel, records_kernel, tap_kernel
from vllm_steer.taps.tables import Tables

HIDDEN = 256


def tables(dtype: torch.dtype) -> Tables:
    config = SteeringConfig(max_rows=2, max_vectors=2, max_instructions=2, capture_rows=4)
    return Tables(
        config, num_sites=3, hidden_size=HIDDEN, max_tokens=8, max_requests=2, dtype=dtype, device=torch.device("cpu")
    )


def in_place_of(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, capability: int) -> Compiled:
    found = Compiled(getattr(module, name), capability)
    monkeypatch.setattr(module, name, found)
    return found


@pytest.mark.parametrize(("capability", "dtype"), [(80, torch.float16), (90, torch.bfloat16)])
def test_tap_kernel_compiles(monkeypatch: pytest.MonkeyPatch, capability: int, dtype: torch.dtype) -> None:
    """Catches a tap kernel that compiles only for one summand, for one site, or with programmatic dependent launch."""
    found = in_place_of(monkeypatch, tap_kernel, "_tap_kernel", capability)
    monkeypatch.setattr(tap_kernel, "_overlaps", lambda device: capability >= 90)
    tap_kernel.warm_up(tables(dtype), dtype)
    # One or two summands, one or two sites; the first layer's taps without overlap.
    assert len(found.sizes) == 8 and min(found.sizes) > 0


@pytest.mark.parametrize("capability", [80, 90])
def test_assignment_kernels_compile(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """Catches a binary search or running sum whose type changes in the loop."""
    found = [
        in_place_of(monkeypatch, assignment_kernel, name, capability)
        for name in ("_rows_kernel", "_arena_offsets_kernel")
    ]
    assignment_kernel.warm_up(tables(torch.float32))
    assert [len(each.sizes) for each in found] == [1, 1]


@pytest.mark.parametrize("capability", [80, 90])
def test_dynamic_kernels_compile(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """Catches a fold whose type changes in the loop, or a function that has no form in float64."""
    found = [in_place_of(monkeypatch, records_kernel, name, capability) for name in ("_begin_kernel", "_fold_kernel")]
    records_kernel.warm_up(tables(torch.float32))
    assert all(each.sizes and min(each.sizes) > 0 for each in found)


@pytest.mark.parametrize("capability", [80, 90])
def test_projection_kernel_compiles(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """Catches a projection kernel without tensor-core instructions, with row indices or without."""
    found = in_place_of(monkeypatch, projection_kernel, "_products_kernel", capability)
    projection_kernel.warm_up(tables(torch.bfloat16).arena)
    assert len(found.sizes) == 2


def test_rejects_code_that_only_the_interpreter_runs() -> None:
    """Negative control: a kernel that the interpreter runs and the compiler rejects."""

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def changing(out, n):  # type: ignore[no-untyped-def]
        value = 0
        for _ in range(n):
            value = value + 0.5
        out[0] = value

    with pytest.raises(triton.CompilationError):
        Compiled(changing, 90).launch(torch.zeros(1), 3)

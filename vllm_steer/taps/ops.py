# SPDX-License-Identifier: Apache-2.0
"""Choice of the implementations for a device: Triton kernels on CUDA, the plain-torch definitions elsewhere.

The tap itself is a custom op that PyTorch dispatches by device (:mod:`vllm_steer.taps.tap`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_steer.taps.assignment import BatchLayout, assign_arena_offsets, assign_rows
from vllm_steer.taps.heads import Activation, Head, Places, record_top_k
from vllm_steer.taps.projection import products_at
from vllm_steer.taps.records import begin_records, fold_records
from vllm_steer.taps.tables import Tables


@dataclass(frozen=True)
class DeviceOps:
    """Functions that run beside the model's forward pass, named after their definitions."""

    assign_rows: Callable[[Tables, BatchLayout, int], None] = assign_rows
    assign_arena_offsets: Callable[[Tables, int], None] = assign_arena_offsets
    products_at: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor] = products_at
    begin_records: Callable[[Tables, BatchLayout, int], None] = begin_records
    fold_records: Callable[[Tables, BatchLayout, int], None] = fold_records
    record_top_k: Callable[[torch.Tensor, Places, torch.Tensor, Activation | None, int], None] = record_top_k
    warm_up_head: Callable[[Head], None] = lambda head: None
    """Compiles the kernels of a head. All tensor-parallel ranks call it once the model can run."""


def device_ops(tables: Tables, dtype: torch.dtype) -> DeviceOps:
    """Return the functions for the tables' device, with all kernels compiled.

    Kernels are compiled here because vLLM warns about, or with ``--jit-monitor-mode error`` refuses, kernels that are
    compiled while it serves.

    Args:
        tables: The rank's device tables.
        dtype: The model's dtype.
    """
    if tables.device.type != "cuda":
        return DeviceOps()
    from vllm_steer.taps import (
        assignment_kernel,
        projection_kernel,
        records_kernel,
        row_write_kernel,
        tap_kernel,
        top_k_kernel,
    )

    tap_kernel.warm_up(tables, dtype)
    assignment_kernel.warm_up(tables)
    records_kernel.warm_up(tables)
    row_write_kernel.warm_up(tables.device)
    products = products_at
    if projection_kernel.is_supported(tables.device, dtype):
        products = projection_kernel.launch_products
        projection_kernel.warm_up(tables.arena)
    return DeviceOps(
        assignment_kernel.launch_rows,
        assignment_kernel.launch_arena_offsets,
        products,
        records_kernel.launch_begin,
        records_kernel.launch_fold,
        top_k_kernel.launch_top_k,
        lambda head: top_k_kernel.warm_up(head, dtype, tables.device, tables.vector.shape[1]),
    )

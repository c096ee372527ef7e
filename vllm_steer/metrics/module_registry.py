# SPDX-License-Identifier: Apache-2.0
"""Metrics of the registry of steering modules."""

from __future__ import annotations

from vllm_steer.metrics.collectors import set_gauge


def set_registry_gauges(model_name: str, *, modules: int, num_bytes: int, epoch: int, global_steering: bool) -> None:
    """Set the gauges of the registry.

    Every process that reads the registry sees its newest state, so the last process to set the gauges is right.

    Args:
        model_name: The served model.
        modules: Number of registered names.
        num_bytes: Size of the vectors of all versions of all modules.
        epoch: Number of changes so far.
        global_steering: Whether global steering is set.
    """
    set_gauge("registry_modules", modules, model_name=model_name)
    set_gauge("registry_bytes", num_bytes, model_name=model_name)
    set_gauge("registry_epoch", epoch, model_name=model_name)
    set_gauge("global_steering", global_steering, model_name=model_name)

# SPDX-License-Identifier: Apache-2.0
"""The registry as this process sees it. Whoever looks sees the newest state, so the latest to look is right."""

from __future__ import annotations

from vllm_steer.metrics.collectors import set_gauge
from vllm_steer.registry.snapshot import Snapshot


def show_registry(model_name: str, snapshot: Snapshot) -> None:
    """Set the gauges to a state."""
    set_gauge("registry_modules", len(snapshot.index.modules), model_name=model_name)
    set_gauge("registry_bytes", sum(module.num_bytes for module in snapshot.contents.values()), model_name=model_name)
    set_gauge("registry_epoch", snapshot.epoch, model_name=model_name)
    set_gauge("global_steering", snapshot.steering_digest is not None, model_name=model_name)

# SPDX-License-Identifier: Apache-2.0
"""Statistics of one step in a worker."""

from __future__ import annotations

from typing import NamedTuple


class WorkerStats(NamedTuple):
    """Host time and pinned memory that steering and capture used in one step of a worker."""

    seconds: float
    """Host time spent around the model's forward pass."""
    staging_bytes: int
    """Size of the pooled pinned buffers for captured rows."""

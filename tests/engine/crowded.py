# SPDX-License-Identifier: Apache-2.0
"""An engine that preempts requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.conftest import opened


@contextmanager
def crowded_engine(folder: Path, **settings: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Return an engine with 8 cache blocks, and the list of requests that it preempts."""
    with opened(folder, **{"num_gpu_blocks_override": 8, "block_size": 32, "max_model_len": 128, **settings}) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempted: list[Any] = []
        original = scheduler._preempt_request
        scheduler._preempt_request = lambda r, *a, **k: (preempted.append(r), original(r, *a, **k))[1]
        yield llm, preempted

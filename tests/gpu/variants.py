# SPDX-License-Identifier: Apache-2.0
"""Engines of the GPU tests: both runners, with CUDA graphs and eager."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import close
from tests.gpu.runner import V1, V2, choose_runner, runner_of
from tests.tiny import make_llm

VARIANTS: dict[str, dict[str, Any]] = {
    "v2-graphs": {"enforce_eager": False},
    "v2-eager": {},
    "v1-graphs": {"enforce_eager": False},
}
"""Settings of an engine by name; the name begins with the runner."""


@contextmanager
def running(variant: str, folder: Path, **settings: Any) -> Iterator[Any]:
    """Start the engine of a variant with little GPU memory and shut it down afterwards."""
    old = variant.startswith("v1")
    small = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 30}
    with pytest.MonkeyPatch.context() as patch:
        choose_runner(patch, "0" if old else "1")
        llm = make_llm(folder, **{**small, **settings, **VARIANTS[variant]})
        assert runner_of(llm) == (V1 if old else V2)
        yield llm
        close(llm)

# SPDX-License-Identifier: Apache-2.0
"""The executor with ``distributed_executor_backend="ray"``, whose workers are Ray actors on any number of hosts.

vLLM's ``RayExecutorV2`` derives from ``MultiprocExecutor`` and passes outputs through the same message queues, so the
rows of all stages are collected in the same way as on one host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_steer.compat.internals import RayExecutorV2
from vllm_steer.engine.executor import RowsOfAllStages
from vllm_steer.settings import REGISTRY_VARIABLE


class SteeringRayExecutor(RowsOfAllStages, RayExecutorV2):  # type: ignore[misc]
    """vLLM's ``RayExecutorV2`` with the rows of every stage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _without(REGISTRY_VARIABLE):  # vLLM copies the environment to all workers
            super().__init__(*args, **kwargs)


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Remove a variable that can contain a password from the environment for a while."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value

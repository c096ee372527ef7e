# SPDX-License-Identifier: Apache-2.0
"""Loggers that write through vLLM's log handlers, the only ones that a vLLM server installs."""

from __future__ import annotations

from typing import Any

from vllm_steer.compat.internals import init_logger


def steering_logger(name: str) -> Any:
    """Return the logger for the module ``name``."""
    return init_logger(f"vllm.{name}")

# SPDX-License-Identifier: Apache-2.0
"""Logging through vLLM's handlers: they are attached to the logger ``vllm``, and nothing else of a server shows."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger


def steering_logger(name: str) -> Any:
    """The logger of one of our modules."""
    return init_logger(f"vllm.{name}")

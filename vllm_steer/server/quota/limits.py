# SPDX-License-Identifier: Apache-2.0
"""Values of the server's limits (:data:`vllm_steer.limits.SERVER_LIMITS`), from its parsed flags."""

from __future__ import annotations

from vllm_steer.limits import ServerLimit


def value_of(args: object, limit: ServerLimit) -> int:
    """Return the value of ``limit`` from the parsed server flags."""
    value = getattr(args, limit.dest, None)
    return int(limit.default if value is None else value)


def processes_of(args: object) -> int:
    """Return the number of API server processes that share a server-wide or per-key limit."""
    return max(getattr(args, "api_server_count", None) or 1, 1)


def share_of(value: int, processes: int) -> int:
    """Return one process's share of ``value``, rounded up."""
    return -(-value // processes)

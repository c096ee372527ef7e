# SPDX-License-Identifier: Apache-2.0
"""Server settings read from the parsed flags."""

from __future__ import annotations

import secrets

from vllm_steer.limits import (
    EXPIRY_S,
    INLINE_KIB,
    MAX_BODY_MIB,
    MAX_NORM,
    REGISTRY_MIB,
    REGISTRY_MODULES,
    RESPONSE_MIB,
    STORE_MIB,
    ServerLimit,
)
from vllm_steer.registry.index import RegistryLimits
from vllm_steer.server.capture_store import StoreLimits

STORE_NAME_DEST = "capture_store_name"
"""Attribute of the parsed flags, without a flag of its own: parsed flags reach all processes of a server."""


def value_of(args: object, limit: ServerLimit) -> int:
    """Return the value of ``limit`` from the parsed server flags."""
    value = getattr(args, limit.dest, None)
    return int(limit.default if value is None else value)


def max_body_bytes(args: object) -> int:
    """Return the largest HTTP body with steering or capture fields, in bytes."""
    return value_of(args, MAX_BODY_MIB) << 20


def store_limits(args: object) -> StoreLimits:
    """Return the limits of the capture store and of rows in responses."""
    return StoreLimits(
        inline_bytes=value_of(args, INLINE_KIB) << 10,
        budget_bytes=value_of(args, STORE_MIB) << 20,
        expiry_seconds=value_of(args, EXPIRY_S),
        response_bytes=value_of(args, RESPONSE_MIB) << 20,
    )


def registry_limits(args: object) -> RegistryLimits:
    """Return the limits of the module registry."""
    return RegistryLimits(
        modules=value_of(args, REGISTRY_MODULES),
        num_bytes=value_of(args, REGISTRY_MIB) << 20,
        max_norm=value_of(args, MAX_NORM),
    )


def capture_store_name(args: object) -> str:
    """Return the name of the capture store's folder, which all processes of a server share."""
    return getattr(args, STORE_NAME_DEST, None) or secrets.token_hex(8)

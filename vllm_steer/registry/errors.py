# SPDX-License-Identifier: Apache-2.0
"""Errors of the registry that are answered otherwise than a wrong request is."""

from __future__ import annotations

from vllm_steer.errors import SteeringError


class UnknownModuleError(SteeringError):
    """No module, or no version of it, goes by that reference."""


class RegistryFullError(SteeringError):
    """What is to be registered would take the registry over one of its limits."""


class RegistryUnavailableError(SteeringError):
    """The registry's folder cannot be read or written now."""

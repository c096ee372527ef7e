# SPDX-License-Identifier: Apache-2.0
"""Errors of the registry that have an HTTP status of their own."""

from __future__ import annotations

from vllm_steer.errors import SteeringError


class UnknownModuleError(SteeringError):
    """The reference matches no module, or no version of it."""


class RegistryFullError(SteeringError):
    """The change would exceed a limit of the registry."""


class RegistryUnavailableError(SteeringError):
    """The registry's directory cannot be read or written."""

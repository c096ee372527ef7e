# SPDX-License-Identifier: Apache-2.0
"""Errors of the registry that have an HTTP status of their own."""

from __future__ import annotations

from collections.abc import Collection

from vllm_steer.errors import SteeringError
from vllm_steer.request.references import REGISTER
from vllm_steer.request.scalars import did_you_mean

FIELD = "steering registry"
"""Field of errors that concern the whole registry."""
_MAX_NAMES = 10


class UnknownModuleError(SteeringError):
    """The reference matches no module, or no version of it."""

    _without_names: UnknownModuleError | None = None

    def with_names(self, names: Collection[str]) -> UnknownModuleError:
        """Return the error with the names of registered modules, for clients that may list them."""
        named = self.problem.split("'")[1:2]
        if named and named[0] in names:  # it lacks a version only
            return self
        listed = ", ".join(sorted(names)[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        hint = did_you_mean(named[0], names) if named else ""
        if not listed or (named and "." in named[0]):  # perhaps the name of a file
            listed = f"{listed or 'none'}; {REGISTER}"
        error = UnknownModuleError(self.field, f"{self.problem}; registered modules: {listed}{hint}")
        error._without_names = self
        return error

    def without_names(self) -> UnknownModuleError:
        """Return the error without the names that `with_names` added, for clients that may not list modules."""
        return self._without_names or self


class RegistryFullError(SteeringError):
    """The change would exceed a limit of the registry."""


class RegistryUnavailableError(SteeringError):
    """The registry's directory or database cannot be read or written."""

    def __init__(self, field: str, problem: str, place: str = "") -> None:
        """Create an error; ``place``, which clients of a server do not see, is a path or a database and its reason."""
        super().__init__(field, f"{place}: {problem}" if place else problem)
        self.public_problem = problem

# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from vllm_steer.errors import SteeringError


def imported_on_use(
    package: str, modules: Mapping[str, str], refused: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: Name of the package.
        modules: The public names of each module, separated by spaces; modules are relative (``.model``) or absolute.
        refused: Reasons by name of names that raise SteeringError.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name in module_of:
            return getattr(import_module(module_of[name], package), name)
        if refused and name in refused:
            raise SteeringError(name, refused[name])
        raise AttributeError(f"module {package} has no attribute {name}")

    return find

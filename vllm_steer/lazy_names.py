# SPDX-License-Identifier: Apache-2.0
"""Public names of a package that are imported on first use, so that importing the package costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from vllm_steer.errors import SteeringError


def lazy_names(
    package: str, modules: Mapping[str, str], refused: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return the function ``__getattr__`` of a package.

    Args:
        package: Name of the package.
        modules: Module that defines each name, relative to the package.
        refused: Reasons by name of names that raise SteeringError.
    """

    def get(name: str) -> Any:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        if refused and name in refused:
            raise SteeringError(name, refused[name])
        raise AttributeError(f"module {package} has no attribute {name}")

    return get

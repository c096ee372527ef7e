# SPDX-License-Identifier: Apache-2.0
"""Helper: an object whose attributes are looked up by name has no ``__dict__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def without_namespace(get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Wrap a ``__getattr__`` that answers every name, so that ``hasattr(x, "__dict__")`` is False."""

    def found(library: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return get(library, name)

    return found

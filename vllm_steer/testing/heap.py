# SPDX-License-Identifier: Apache-2.0
"""Cheap garbage collections for processes that start one engine after another.

vLLM collects about ten times in an engine's life, and unfreezes the heap before it does. Each of these collections
traverses all loaded modules: on a CPU, that is four of the five seconds in which a tiny engine starts and stops.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_FREEZE: Final = gc.freeze


def exclude_existing_objects() -> None:
    """Exclude the objects that exist now from garbage collection.

    An engine that is running at this moment would never be collected.
    """
    gc.collect()
    _FREEZE()


@contextmanager
def cheap_collections() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection, and keep vLLM from including them again.

    They stay excluded afterwards.
    """
    exclude_existing_objects()
    module: Any = gc
    before = gc.freeze, gc.unfreeze
    module.freeze = module.unfreeze = _ignore
    try:
        yield
    finally:
        module.freeze, module.unfreeze = before


def _ignore() -> None:
    """Do nothing, instead of ``gc.freeze`` or ``gc.unfreeze``."""

# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM, imported on first use.

All modules outside ``compat`` import vLLM's names from here, so :mod:`vllm_steer.compat.seams` is the complete list of
imports, and a name that moves between versions is handled in one place::

    from vllm_steer.compat.internals import Scheduler, current_platform

The names are the last components of the rows of kind ``IMPORT`` and ``WIRE``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from vllm_steer.compat.seams import SEAMS, Kind, Seam
from vllm_steer.compat.wraps import file_of
from vllm_steer.errors import IncompatibleError, install_hint

LIST_ALL: Final = "python scripts/release_diff.py installed --old 0.33.0"
"""Command that lists all differences between the installed vLLM and a tested version."""
_CPU_BUILD: Final = '`pip install ".[cpu]" --extra-index-url https://download.pytorch.org/whl/cpu`'
NOT_INSTALLED: Final = f"vLLM is not installed; {install_hint('cuda', f', or for the CPU build {_CPU_BUILD},')}"
_IMPORTED: Final[Mapping[str, Seam]] = {
    name: seam
    for seam in SEAMS
    if seam.kind in (Kind.IMPORT, Kind.WIRE) and not (name := seam.path.rpartition(":")[2]).startswith("_") and name
}


def __getattr__(name: str) -> Any:
    seam = _IMPORTED.get(name)
    if seam is None:
        raise AttributeError(f"vllm_steer.compat.seams has no row of kind IMPORT or WIRE for {name}")
    for place in seam.places:
        module = place.partition(":")[0]
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            # Other missing modules are vLLM itself or one of its requirements, not a difference between versions.
            if error.name == "vllm":
                raise ModuleNotFoundError(NOT_INSTALLED, name="vllm") from None
            if not str(error.name).startswith("vllm."):
                raise
        except AttributeError:
            pass
    raise IncompatibleError(
        f"this vLLM has no {name} in {' or in '.join(map(file_of, seam.places))}; vllm-steer needs it: {seam.why}. "
        f"All differences: {LIST_ALL}"
    )


def __dir__() -> list[str]:
    return sorted(_IMPORTED)

# SPDX-License-Identifier: Apache-2.0
"""Rows that a test run proves: one of each family, and the rows of the current part (``shard.py``).

With ``CONFORMANCE=newest``, those whose layer class no other version of vLLM has, as it is in the installed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from packaging.version import Version

from tests.conformance.model import TinyModel
from tests.conformance.no_reference import NO_REFERENCE
from tests.conformance.shard import NEWEST, selected
from tests.conformance.ways import recipe_of
from tests.conformance.zoo import ZOO
from vllm_steer.compat.sources import installed_version
from vllm_steer.models.digests import proven_digests
from vllm_steer.models.recipes import RECIPES

FAMILIES: Final = (
    "llama", "gemma2", "gpt2", "exaone4", "granite", "cohere", "gpt_neox", "olmo2", "mixtral", "mamba2",
    "nemotron_h", "zamba2", "bailingmoe",
)  # fmt: skip
"""One row for every way in which taps are installed on a layer; every run proves them."""


def choose(rows: Sequence[TinyModel], in_part: Callable[[str], bool] = selected) -> list[TinyModel]:
    """Return the rows of the families and of a part, without rows that need a GPU or a later vLLM."""
    here = [tiny for tiny in rows if runs_here(tiny)]
    if NEWEST:
        return [tiny for tiny in here if is_changed(tiny)]
    return [tiny for tiny in here if tiny.name in FAMILIES or in_part(tiny.name)]


def runs_here(tiny: TinyModel) -> bool:
    """Return whether the installed vLLM has the row's layer class, with kernels for a CPU."""
    return not tiny.gpu_only and not (tiny.since and Version(installed_version()) < Version(tiny.since))


def is_changed(tiny: TinyModel) -> bool:
    """Return whether a layer class of the row has source that was proven with the installed vLLM alone."""
    return any(recipe_of(tiny, layer, RECIPES.values()).layer_class in _changed_layers() for layer in tiny.layers)


@cache
def _changed_layers() -> frozenset[str]:
    here = f"vllm {installed_version()}"
    tables = proven_digests()
    others = {item for version, table in tables.items() if version != here for item in table.items()}
    return frozenset(name for name, _ in tables.get(here, {}).items() - others)


HAVE_PARITY: Final = [tiny for tiny in ZOO if tiny.no_parity is None]
HAVE_IDENTITIES: Final = [
    tiny for tiny in (*ZOO, *NO_REFERENCE) if tiny.no_parity is not None or not tiny.is_known_to_hf
]
PARITY: Final = choose(HAVE_PARITY)
"""Rows of this run that are compared with HF Transformers."""
IDENTITIES: Final = choose(HAVE_IDENTITIES)
"""Rows of this run that are proven inside vLLM."""

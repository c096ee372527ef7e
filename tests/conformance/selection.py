# SPDX-License-Identifier: Apache-2.0
"""Rows that a test run proves: one of each family, and the rows of the current part (``shard.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tests.conformance.model import TinyModel
from tests.conformance.no_reference import NO_REFERENCE
from tests.conformance.shard import selected
from tests.conformance.zoo import ZOO

FAMILIES: Final = (
    "llama", "gemma2", "gpt2", "exaone4", "granite", "cohere", "gpt_neox", "olmo2", "mixtral", "mamba2",
    "nemotron_h", "zamba2", "bailingmoe",
)  # fmt: skip
"""One row for every way in which taps are installed on a layer; every run proves them."""


def choose(rows: Sequence[TinyModel], in_part: Callable[[str], bool] = selected) -> list[TinyModel]:
    """Return the rows of the families and of a part, without rows that need a GPU."""
    return [tiny for tiny in rows if not tiny.gpu_only and (tiny.name in FAMILIES or in_part(tiny.name))]


HAVE_PARITY: Final = [tiny for tiny in ZOO if tiny.no_parity is None]
HAVE_IDENTITIES: Final = [
    tiny for tiny in (*ZOO, *NO_REFERENCE) if tiny.no_parity is not None or not tiny.is_known_to_hf
]
PARITY: Final = choose(HAVE_PARITY)
"""Rows of this run that are compared with HF Transformers."""
IDENTITIES: Final = choose(HAVE_IDENTITIES)
"""Rows of this run that are proven inside vLLM."""

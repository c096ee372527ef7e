# SPDX-License-Identifier: Apache-2.0
"""Helper table: the rows that run on a GPU, which are all rows with GPU-only kernels and one of each family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.conformance.model import TinyModel
from tests.conformance.no_reference import NO_REFERENCE
from tests.conformance.zoo import BY_NAME, ZOO

FAMILIES: Final = ("llama", "gemma2", "gpt2", "exaone4", "granite", "cohere", "gpt_neox", "mamba2", "mixtral")

ON_GPU: Final[Mapping[str, TinyModel]] = {
    **{name: BY_NAME[name] for name in FAMILIES},
    **{tiny.name: tiny for tiny in (*ZOO, *NO_REFERENCE) if tiny.gpu_only},
}

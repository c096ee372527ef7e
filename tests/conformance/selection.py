# SPDX-License-Identifier: Apache-2.0
"""Which rows a test run takes: one of each family, and every tenth of the others, another tenth each week.

``CONFORMANCE=all`` takes all of them (``make conformance``), ``CONFORMANCE_SHARD`` a given tenth. A row's tenth comes
from its name, so that it stays the same when rows are added.
"""

from __future__ import annotations

import datetime
import os
import zlib
from collections.abc import Sequence
from typing import Final

from tests.conformance.model import TinyModel
from tests.conformance.no_reference import NO_REFERENCE
from tests.conformance.zoo import ZOO

EVERYTHING: Final = os.environ.get("CONFORMANCE") == "all"
SHARDS: Final = 10
FAMILIES: Final = (
    "llama", "gemma2", "gpt2", "exaone4", "granite", "cohere", "gpt_neox", "olmo2", "mixtral", "mamba2",
    "nemotron_h", "zamba2", "bailingmoe",
)  # fmt: skip
"""One row for every way in which taps meet a layer."""


def shard() -> int:
    """This run's tenth."""
    given = os.environ.get("CONFORMANCE_SHARD")
    week = datetime.datetime.now(datetime.UTC).isocalendar().week
    return (int(given) if given else week) % SHARDS


def chosen(rows: Sequence[TinyModel]) -> list[TinyModel]:
    """Those rows of this run that run on a CPU."""
    return [
        tiny
        for tiny in rows
        if not tiny.gpu_only
        and (EVERYTHING or tiny.name in FAMILIES or zlib.crc32(tiny.name.encode()) % SHARDS == shard())
    ]


AGAINST_HF: Final = chosen([tiny for tiny in ZOO if tiny.inside is None])
INSIDE: Final = chosen([tiny for tiny in (*ZOO, *NO_REFERENCE) if tiny.inside is not None or not tiny.is_known_to_hf])

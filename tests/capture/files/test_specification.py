# SPDX-License-Identifier: Apache-2.0
"""The page ``docs/reference/capture-files.md`` agrees with the code."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.repo.tree import read
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files.format import DTYPES, FORMAT, VERSION, RequestEntry, SiteEntry
from vllm_steer.capture.files.rotation import ROTATION_LIMITS

PAGE = read("docs/reference/capture-files.md")


def documented_names(header: str) -> set[str]:
    """The names in the first column of the table with this header."""
    table = PAGE.split(header, 1)[1].split("\n\n", 1)[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("| field | type | meaning |", set(RequestEntry.__struct_fields__)),
        ("| field of a site | type | meaning |", set(SiteEntry.__struct_fields__)),
        ("| option | meaning |", set(inspect.signature(FilesystemConsumer).parameters)),
        ("| layout | file name | a file is complete |", {"per_request", *ROTATION_LIMITS}),
    ],
)
def test_tables_list_every_name(header: str, names: set[str]) -> None:
    """Catches a field, an option or a layout that was added or renamed without the page."""
    assert documented_names(header) == names


def test_constants() -> None:
    """Catches another format version, dtype or default limit than the page states."""
    packed, sharded = ROTATION_LIMITS["packed"], ROTATION_LIMITS["sharded"]
    assert packed.max_size is not None and sharded.max_size is not None
    for text in (
        f'`format` = `"{FORMAT}"`, `version` = `"{VERSION}"`',
        ", ".join(list(DTYPES.values())[:-1]) + f" or {list(DTYPES.values())[-1]}",
        f"{packed.max_requests} requests, {packed.max_size >> 20} MiB or {packed.max_seconds:.0f} s",
        f"after {sharded.max_size >> 30} GiB or {sharded.max_seconds:.0f} s",
    ):
        assert text in PAGE

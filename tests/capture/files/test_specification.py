# SPDX-License-Identifier: Apache-2.0
"""The page ``docs/reference/capture-files.md`` agrees with the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tests.capture.captured import captured
from tests.repo.tree import read
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files import journal, stream, tensors
from vllm_steer.capture.files.export import to_arrow
from vllm_steer.capture.files.format import DTYPES, FORMAT, RequestEntry
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.capture.files.rotation import ROTATION_LIMITS

PAGE = read("docs/reference/capture-files.md")
COMMON = set(RequestEntry.__struct_fields__) - {"sites"}
"""Properties in files of each format; the sites have other properties in each."""


def documented_names(header: str) -> set[str]:
    """The names in the first column of the table with this header."""
    table = PAGE.split(header, 1)[1].split("\n\n", 1)[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("| property | type | meaning |", COMMON),
        ("| column | type | content |", set(stream.SCHEMA.names)),
        ("| property of a stream | type | meaning |", set(stream.StreamEntry.__struct_fields__) - COMMON),
        ("| property of a safetensors file | type | meaning |", set(tensors.TensorEntry.__struct_fields__) - COMMON),
        ("| property of a site in a stream | type | meaning |", set(stream.StreamSite.__struct_fields__)),
        ("| property of a site in a safetensors file | type | meaning |", set(tensors.TensorSite.__struct_fields__)),
        ("| property of a submitted request | type | meaning |", set(journal.Submission.__struct_fields__)),
        ("| option | meaning |", set(inspect.signature(FilesystemConsumer).parameters)),
        ("| layout | file name | a file is complete |", {"per_request", *ROTATION_LIMITS}),
    ],
)
def test_tables_list_every_name(header: str, names: set[str]) -> None:
    """Catches a property, a column, an option or a layout that was added or renamed without the page."""
    assert documented_names(header) == names


def test_columns_of_exports(tmp_path: Path) -> None:
    """Catches a column of a Parquet file that was added, renamed or has another type than the page states."""
    pytest.importorskip("pyarrow")
    consumer = FilesystemConsumer(root=str(tmp_path))
    consumer.accept(captured())
    header = "| column of an export | type | content |"
    fields = to_arrow(open_captures(tmp_path)).schema
    assert documented_names(header) == set(fields.names)
    for field in fields:
        if field.name not in ("layer", "row"):
            assert re.search(rf"`{field.name}`[^|]* \| {field.type}[ ,]", PAGE.split(header, 1)[1]), field


def test_column_types() -> None:
    """Catches a column that has another type than the page states."""
    for field in stream.SCHEMA:
        assert re.search(rf"\| `{field.name}` \| {re.escape(str(field.type).replace('item: ', ''))} \|", PAGE), field


def test_constants() -> None:
    """Catches another format version, dtype, suffix or default limit than the page states."""
    packed, sharded = ROTATION_LIMITS["packed"], ROTATION_LIMITS["sharded"]
    assert packed.max_size is not None and sharded.max_size is not None
    for text in (
        f'`format` = `"{FORMAT}"`, `version` = `"{stream.VERSION}"`',
        f'`format` = `"{FORMAT}"`, `version` = `"{tensors.VERSION}"`',
        ", ".join(list(DTYPES)[:-1]) + f" or {list(DTYPES)[-1]}",
        f"{packed.max_requests} requests, {packed.max_size >> 20} MiB or {packed.max_seconds:.0f} s",
        f"after {sharded.max_size >> 30} GiB or {sharded.max_seconds:.0f} s",
        f"`{stream.REQUEST.decode()}`",
        f"`{stream.CHECKSUM.decode()}`",
        stream.END_OF_STREAM.hex(" "),
        f"`packed-TIME-RANDOM{stream.SUFFIX}`",
        f"`{journal.PREFIX}-TIME-RANDOM{journal.SUFFIX}`",
    ):
        assert text in PAGE, text

# SPDX-License-Identifier: Apache-2.0
"""Arrow IPC streams of captured rows: many requests per file, appended one by one.

A record batch has one line per site. A request is one or several batches; the custom metadata of the last one has the
request's properties, so a request without them is incomplete. A stream that ends within a request is read up to the
last whole one. The end-of-stream marker shows that nothing will be appended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from vllm_steer.capture.files.format import (
    FORMAT,
    RequestEntry,
    dtype_name,
    entry_fields,
    row_bytes,
)
from vllm_steer.capture.results import CapturedRequest

VERSION = "2"
SUFFIX = ".arrows"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
REQUEST, CHECKSUM = b"request", b"xxh3_64"
_BATCH_BYTES = 1 << 18
"""Sites share a batch up to this size. Larger sites have batches of their own and are written without a copy."""

SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("point", pa.string(), nullable=False),
        pa.field("layer", pa.int32(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("positions", pa.list_(pa.int32()), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("rows", pa.large_binary(), nullable=False),
    ],
    metadata={"format": FORMAT, "version": VERSION},
)


class StreamSite(msgspec.Struct, frozen=True):
    """A site of a request."""

    point: str
    layer: int
    dtype: str
    """Safetensors name of the dtype."""
    shape: tuple[int, int]
    """Number of rows, and their width."""


class StreamEntry(RequestEntry, frozen=True, omit_defaults=True, kw_only=True):
    """Properties of one sample of one request, as stored with its last batch."""

    sites: tuple[StreamSite, ...]
    xxh3_64: str
    """Checksum of ``positions``, ``token_ids`` and ``rows`` of all sites, in order."""


class Line(NamedTuple):
    """Line of one site."""

    site: StreamSite
    positions: Any
    """int32 array ``[tokens]``."""
    token_ids: Any
    """int32 array ``[tokens]``."""
    rows: Any
    """Buffer of the rows."""


class StreamEncoder:
    """Encoder of one stream."""

    def __init__(self) -> None:
        self._sink = _Sink()
        self._writer = pa.ipc.new_stream(self._sink, SCHEMA)

    def encode(self, captured: CapturedRequest, run: str | None) -> list[Any]:
        """Return the parts of one request, which refer to its rows; the first ones hold the schema.

        Raises as `dtype_name` does.
        """
        lines, checksum = [], xxhash.xxh3_64()
        tokens: dict[bytes, tuple[Any, Any]] = {}
        for (point, layer), site in captured.sites.items():
            key = site.positions.tobytes()
            if key not in tokens:
                tokens[key] = site.positions.astype(np.int32), captured.tokens_at(site.positions).astype(np.int32)
            entry = StreamSite(point, layer, dtype_name(site), (site.rows.shape[0], site.rows.shape[1]))
            line = Line(entry, *tokens[key], row_bytes(site.rows))
            for part in line[1:]:
                checksum.update(part)
            lines.append(line)
        properties = StreamEntry(
            sites=tuple(line.site for line in lines), xxh3_64=checksum.hexdigest(), **entry_fields(captured, run)
        )
        text = msgspec.json.encode(properties)
        groups = list(_grouped(lines))
        for group in groups:
            described = text if group is groups[-1] else b""
            metadata = {REQUEST: described, CHECKSUM: xxhash.xxh3_64_hexdigest(described)}
            self._writer.write_batch(_batch(properties, group), metadata)
        return self._sink.take()


class _Sink:
    """A file object that collects what is written, without copying the rows."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[Any] = []

    def write(self, data: Any) -> int:
        self._parts.append(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        return None

    def take(self) -> list[Any]:
        parts, self._parts = self._parts, []
        return parts


def _grouped(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Yield the lines of each batch; at least one batch."""
    group: list[Line] = []
    for line in lines:
        if group and sum(each.rows.nbytes for each in group) + line.rows.nbytes > _BATCH_BYTES:
            yield group
            group = []
        group.append(line)
    yield group


def _batch(entry: StreamEntry, lines: Sequence[Line]) -> Any:
    def offsets(sizes: list[int], dtype: Any) -> Any:
        return np.cumsum([0, *sizes], dtype=dtype)

    def lists(arrays: list[Any]) -> Any:
        values = np.concatenate([np.empty(0, np.int32), *arrays])
        return pa.ListArray.from_arrays(offsets([len(array) for array in arrays], np.int32), values)

    n, sites = len(lines), [line.site for line in lines]
    data = lines[0].rows if n == 1 else b"".join(line.rows for line in lines)
    ends = offsets([line.rows.nbytes for line in lines], np.int64)
    columns = [
        pa.array([entry.request_id] * n, pa.string()),
        pa.array([entry.sample] * n, pa.int32()),
        pa.array([site.point for site in sites], pa.string()),
        pa.array([site.layer for site in sites], pa.int32()),
        pa.array([site.dtype for site in sites], pa.string()),
        pa.array([site.shape[1] for site in sites], pa.int32()),
        lists([line.positions for line in lines]),
        lists([line.token_ids for line in lines]),
        pa.LargeBinaryArray.from_buffers(pa.large_binary(), n, [None, pa.py_buffer(ends), pa.py_buffer(data)]),
    ]
    return pa.record_batch(columns, schema=SCHEMA)

# SPDX-License-Identifier: Apache-2.0
"""Arrow IPC streams of captured rows: many requests per file, appended one by one.

A record batch has one line per site. A request is one or several batches; the custom metadata of the last one has the
request's properties, so a request without them is incomplete. A stream that ends within a request is read up to the
last whole one. The end-of-stream marker shows that nothing will be appended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
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
)
from vllm_steer.capture.results import CapturedRequest, row_bytes

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

_TYPES = {field.name: field.type for field in SCHEMA}
_INT32 = pa.int32()


class StreamSite(msgspec.Struct, frozen=True):
    """A site of a request."""

    point: str
    layer: int
    dtype: str
    """Safetensors name of the dtype."""
    shape: tuple[int, int]
    """Number of rows, and their width."""
    tokens: int
    """Number of positions."""


class StreamEntry(RequestEntry, frozen=True, omit_defaults=True, kw_only=True):
    """Properties of one sample of one request, as stored with its last batch."""

    sites: tuple[StreamSite, ...]
    xxh3_64: str
    """Checksum of the values of ``positions``, of ``token_ids`` and of ``rows`` of each batch, in order."""


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
        lines = []
        tokens: dict[bytes, tuple[Any, Any]] = {}
        for (point, layer), site in captured.sites.items():
            key = site.positions.tobytes()
            if key not in tokens:
                tokens[key] = site.positions.astype(np.int32), captured.tokens_at(site.positions).astype(np.int32)
            dtype, (num_rows, width) = dtype_name(site), site.rows.shape
            entry = StreamSite(point, layer, dtype, (num_rows, width), len(site.positions))
            lines.append(Line(entry, *tokens[key], pa.py_buffer(row_bytes(site.rows))))
        fields = entry_fields(captured, run)
        checksum = xxhash.xxh3_64()
        groups = list(_grouped(lines))
        for number, group in enumerate(groups, 1):
            batch, values = _batch(fields["request_id"], fields["sample"], group)
            for part in values:
                checksum.update(part)
            text = b""
            if number == len(groups):
                sites = tuple(line.site for line in lines)
                text = msgspec.json.encode(StreamEntry(sites=sites, xxh3_64=checksum.hexdigest(), **fields))
            self._writer.write_batch(batch, {REQUEST: text, CHECKSUM: xxhash.xxh3_64_hexdigest(text)})
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
    size = 0
    for line in lines:
        if group and size + line.rows.size > _BATCH_BYTES:
            yield group
            group, size = [], 0
        group.append(line)
        size += line.rows.size
    yield group


def _batch(request_id: str, sample: int, lines: Sequence[Line]) -> tuple[Any, tuple[Any, ...]]:
    """Return a batch, and the values of its columns ``positions``, ``token_ids`` and ``rows``."""
    n, name = len(lines), request_id.encode()
    token_offsets = _offsets([line.site.tokens for line in lines], np.int32)
    row_offsets = _offsets([line.rows.size for line in lines], np.int64)
    positions = pa.py_buffer(b"".join([line.positions for line in lines]))
    token_ids = pa.py_buffer(b"".join([line.token_ids for line in lines]))
    rows = lines[0].rows if n == 1 else pa.py_buffer(b"".join([line.rows for line in lines]))
    # From buffers, because pyarrow takes longer to convert Python objects.
    columns = [
        _column("request_id", n, _offsets([len(name)] * n, np.int32), pa.py_buffer(name * n)),
        _column("sample", n, pa.py_buffer(sample.to_bytes(4, "little") * n)),
        *_site_columns(tuple([(site.point, site.layer, site.dtype, site.shape[1]) for site, *_ in lines])),
        _list_column("positions", n, token_offsets, positions),
        _list_column("token_ids", n, token_offsets, token_ids),
        _column("rows", n, row_offsets, rows),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA), (positions, token_ids, rows)


@lru_cache(maxsize=64)
def _site_columns(sites: tuple[tuple[str, int, str, int], ...]) -> tuple[Any, ...]:
    """Return the columns ``point``, ``layer``, ``dtype`` and ``width``. Most requests of a server have the same."""
    types = pa.string(), pa.int32(), pa.string(), pa.int32()
    return tuple(pa.array([site[i] for site in sites], types[i]) for i in range(4))


def _column(name: str, n: int, *buffers: Any) -> Any:
    return pa.Array.from_buffers(_TYPES[name], n, [None, *buffers], 0)


def _list_column(name: str, n: int, offsets: Any, values: Any) -> Any:
    inner = pa.Array.from_buffers(_INT32, values.size // 4, [None, values], 0)
    return pa.Array.from_buffers(_TYPES[name], n, [None, offsets], 0, children=[inner])


def _offsets(sizes: Sequence[int], dtype: Any) -> Any:
    return pa.py_buffer(np.fromiter(accumulate(sizes, initial=0), dtype, len(sizes) + 1).tobytes())

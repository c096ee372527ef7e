# SPDX-License-Identifier: Apache-2.0
"""An append-only file of many requests, which appears when it is sealed.

A safetensors header precedes the data and lists every tensor, so room is left for it and it is written last. Rows of
all requests are concatenated into few tensors: ``rows.0``, and another one whenever dtype or width changes. The index,
whose size has no bound, is a tensor at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np

from vllm_steer.capture.files.directory import CaptureDirectory
from vllm_steer.capture.files.format import (
    ALIGNMENT,
    INDEX,
    POSITIONS,
    TOKEN_IDS,
    Int32Array,
    SiteEntry,
    TensorEntry,
    TokenTable,
    dtype_name,
    encode_header,
    request_entry,
    row_bytes,
)
from vllm_steer.capture.results import CapturedRequest, Site, SiteRows

HEADER_SIZE = 64 << 10
MAX_TENSORS = 512
"""Most row and padding tensors; the header also has room for the five tensors at the end."""
_json = msgspec.json.Encoder()


class RowType(NamedTuple):
    """Common dtype and width of the rows of a tensor."""

    dtype: str
    width: int


class SiteBlock(NamedTuple):
    """Rows of one site."""

    row_type: RowType
    site: Site
    site_rows: SiteRows


def site_blocks(captured: CapturedRequest) -> list[SiteBlock]:
    """Return the rows of a request by site, grouped by row type; raises as `dtype_name` does."""
    blocks = [
        SiteBlock(RowType(dtype_name(rows), rows.rows.shape[1]), site, rows) for site, rows in captured.sites.items()
    ]
    return sorted(blocks, key=itemgetter(0))


class PackedFile:
    """A file under construction. A failed append leaves it unchanged."""

    def __init__(self, directory: CaptureDirectory, stem: str) -> None:
        self._part = directory.create(stem)
        self.path = self._part.path
        self._tensors = _TensorList()
        self._tokens: list[dict[str, Int32Array]] = []
        self._num_tokens = 0
        self._index: list[bytes] = []
        self._index_size = 2

    @property
    def num_requests(self) -> int:
        """Number of requests in the file."""
        return len(self._index)

    @property
    def size(self) -> int:
        """Bytes of rows and tokens in the file."""
        return self._tensors.end + 8 * self._num_tokens

    def has_room(self, blocks: Sequence[SiteBlock]) -> bool:
        """Return whether the header can list the tensors of these rows."""
        row_types = len({block.row_type for block in blocks})
        return len(self._tensors.entries) + 2 * row_types <= MAX_TENSORS

    def is_in_root(self) -> bool:
        """Return whether the file will appear in the current root, which may have been moved and created again."""
        return self._part.is_in_root()

    def append(self, captured: CapturedRequest, blocks: Sequence[SiteBlock], tag: str | None) -> int:
        """Append one request, whose rows are ``blocks``, and return its place in the index.

        Raises:
            CaptureWriteError: The request cannot be written.
            ValueError: Its rows have too many dtypes and widths.
        """
        if not self.has_room(blocks):
            raise ValueError(f"captured rows have more than {MAX_TENSORS // 2} different dtypes and widths")
        tensors, tokens = _TensorList(self._tensors.entries), TokenTable(self._num_tokens)
        sites: list[SiteEntry] = []
        buffers: list[memoryview | bytes] = []
        for row_type, (point, layer), site_rows in blocks:
            data, count = row_bytes(site_rows.rows), site_rows.rows.shape[0]
            tensor, first, padding = tensors.extend(row_type, count, data.nbytes)
            buffers += [bytes(padding), data]
            token_range = tokens.add(captured, site_rows.positions)
            sites.append(SiteEntry(point, layer, row_type.dtype, tensor, (first, first + count), token_range))
        entry = _json.encode(request_entry(captured, sites, tag))
        index_size = self._index_size + len(entry) + 1
        # Reserve the space for sealing now, while the request can still be refused.
        self._part.reserve(HEADER_SIZE + tensors.end + 8 * tokens.stop + index_size + 4 * ALIGNMENT)
        self._part.write(buffers, HEADER_SIZE + self._tensors.end)
        self._tensors, self._num_tokens, self._index_size = tensors, tokens.stop, index_size
        self._tokens.append(tokens.arrays())
        self._index.append(entry)
        return len(self._index) - 1

    def seal(self) -> None:
        """Write tokens, index and header, and let the file appear; remove it if it is empty.

        Raises:
            CaptureWriteError: The file cannot be completed. It is removed.
        """
        if not self._index:
            self._part.discard()
            return
        try:
            tensors = _TensorList(self._tensors.entries)
            buffers: list[memoryview | bytes] = []
            for name in (POSITIONS, TOKEN_IDS):
                values = np.concatenate([tokens[name] for tokens in self._tokens])
                buffers += [bytes(tensors.pad()), values.view(np.uint8).data]
                tensors.append(name, "I32", values.shape, values.nbytes)
            index = b"[" + b",".join(self._index) + b"]"
            buffers += [bytes(tensors.pad()), index]
            tensors.append(INDEX, "U8", (len(index),), len(index))
            self._part.write(buffers, HEADER_SIZE + self._tensors.end)
            self._part.write([encode_header(tensors.entries, {}, HEADER_SIZE)], 0)
        except BaseException:
            self._part.discard()
            raise
        self._part.publish(HEADER_SIZE + tensors.end)


class _TensorList:
    """The tensors of a file, in order and without gaps."""

    def __init__(self, entries: Sequence[TensorEntry] = ()) -> None:
        self.entries = list(entries)

    @property
    def end(self) -> int:
        """End of the last tensor."""
        return self.entries[-1].stop if self.entries else 0

    def append(self, name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        self.entries.append(TensorEntry(name, dtype, shape, self.end, self.end + size))

    def extend(self, row_type: RowType, count: int, size: int) -> tuple[str, int, int]:
        """Add ``count`` rows to the last tensor if it has their type, or else to a new one.

        Returns:
            The tensor's name, the number of the first added row in it, and the bytes of padding before the rows.
        """
        last = self.entries[-1] if self.entries else None
        if last is not None and last.name.startswith("rows") and (last.dtype, last.shape[1]) == row_type:
            first = last.shape[0]
            shape = (first + count, row_type.width)
            self.entries[-1] = TensorEntry(last.name, last.dtype, shape, last.start, last.stop + size)
            return last.name, first, 0
        padding = self.pad()
        name = f"rows.{len(self.entries)}"
        self.append(name, row_type.dtype, (count, row_type.width), size)
        return name, 0, padding

    def pad(self) -> int:
        """Align the next tensor and return the bytes of padding, which a tensor of its own covers."""
        padding = -self.end % ALIGNMENT
        if padding:
            self.append(f"pad.{len(self.entries)}", "U8", (padding,), padding)
        return padding

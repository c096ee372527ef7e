# SPDX-License-Identifier: Apache-2.0
"""Reading of Arrow IPC streams of captured rows, also while they are written or after their writer was killed."""

from __future__ import annotations

import os
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import xxhash

from vllm_steer.capture.files.format import DTYPES, FORMAT, CaptureFile, CaptureFileError, StoredSite
from vllm_steer.capture.files.stream import CHECKSUM, END_OF_STREAM, REQUEST, SCHEMA, VERSION, Line, StreamEntry

_HEADER = SCHEMA.serialize().to_pybytes()
_MAX_METADATA = 1 << 24
_PARSE_ERRORS = (pa.ArrowException, OSError, ValueError, LookupError, RecursionError, msgspec.MsgspecError)


class StreamFile(CaptureFile):
    """A stream, possibly one that is being written. It is mapped while rows are read or in use.

    Only the places of its requests are held, 40 bytes each, so that the files of a large directory can stay open.
    """

    def __init__(self, path: Path) -> None:
        """Find the whole requests.

        Raises:
            CaptureFileError: The file is damaged or not a capture file. An incomplete request at the end is not damage.
        """
        self.path = path
        found = scan(path)
        self.sealed = found.sealed
        """Whether the stream has ended."""
        self._places = np.array(found.places, np.uint64).reshape(-1, len(Place._fields))
        self._checked: set[int] = set()
        self._recent: tuple[int, list[Line]] = -1, []

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_checked": set(), "_recent": (-1, [])}
        state.pop("_mapped", None)
        return state

    def __len__(self) -> int:
        return len(self._places)

    def entry(self, index: int) -> StreamEntry:
        """Return the properties of a request."""
        place = self._place(index)
        text = self._mapped[place.text : place.text_end].tobytes()
        if xxhash.xxh3_64_intdigest(text) != place.checksum:
            raise CaptureFileError(f"{self.path} is damaged in request {index}: it has changed since it was opened")
        return _decode(text)

    def shape(self, index: int, number: int) -> tuple[int, int, torch.dtype]:
        """Return number, width and dtype of the rows of a site."""
        site = self.entry(index).sites[number]
        return *site.shape, DTYPES[site.dtype]

    def site(self, index: int, number: int) -> StoredSite:
        """Return the rows and tokens of a site. The first call for a request compares its checksum."""
        site, positions, token_ids, rows = self._lines(index)[number]
        dtype = DTYPES[site.dtype]
        if not rows.size:
            tensor = torch.empty(site.shape, dtype=dtype)
        else:
            start = rows.address - self._mapped.ctypes.data
            tensor = torch.frombuffer(self._mapped, dtype=torch.uint8, count=rows.size, offset=start)
            if start % dtype.itemsize:
                tensor = tensor.clone()
            tensor = tensor.view(dtype).view(site.shape)
        return StoredSite(tensor, torch.tensor(positions), torch.tensor(token_ids))

    def _place(self, index: int) -> Place:
        return Place(*self._places[index].tolist())

    def _lines(self, index: int) -> list[Line]:
        if index == self._recent[0]:
            return self._recent[1]
        start, stop, *_ = self._place(index)
        lines: list[Line] = []
        entry, checksum = self.entry(index), xxhash.xxh3_64()
        try:
            source = pa.BufferReader(pa.py_buffer(self._mapped).slice(start, stop - start))
            while source.tell() < stop - start:
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), SCHEMA)
                batch.validate(full=True)
                tokens = [batch.column(name) for name in ("positions", "token_ids")]
                _, ends, data = batch.column("rows").buffers()  # values of the column would be copies
                bounds = np.frombuffer(ends, np.int64, batch.num_rows + 1).tolist()
                if index not in self._checked:
                    for part in (*(column.flatten().to_numpy() for column in tokens), data[bounds[0] : bounds[-1]]):
                        checksum.update(part)
                for i, (first, end) in enumerate(pairwise(bounds)):
                    positions, token_ids = (column[i].values.to_numpy() for column in tokens)
                    site = entry.sites[len(lines)]
                    lines.append(Line(site, positions, token_ids, data.slice(first, end - first)))
        except _PARSE_ERRORS as error:
            raise CaptureFileError(f"{self.path} is damaged in request {index}: {error}") from None
        whole = len(lines) == len(entry.sites) and all(map(_has_its_sizes, lines))
        if not whole or (index not in self._checked and checksum.hexdigest() != entry.xxh3_64):
            raise CaptureFileError(f"{self.path} is damaged in request {index}: its checksum differs")
        self._checked.add(index)
        self._recent = index, lines
        return lines

    @cached_property
    def _mapped(self) -> npt.NDArray[np.uint8]:
        return _map(self.path)


class Place(NamedTuple):
    """Bytes of one whole request in a stream."""

    start: int
    """First byte of its first message."""
    stop: int
    """The byte behind its last message."""
    text: int
    """First byte of its properties."""
    text_end: int
    checksum: int
    """XXH3 checksum of its properties."""


class Scan(NamedTuple):
    """The whole requests of a stream."""

    places: list[Place]
    end: int
    """End of the last whole request."""
    sealed: bool


def scan(path: Path | str) -> Scan:
    """Find the whole requests of a stream; only their properties are read.

    Raises:
        CaptureFileError: The file is damaged or not a capture file.
    """
    places: list[Place] = []
    end, size, sealed, problem = 0, 0, False, "it is empty"
    if os.path.getsize(path):
        mapped = _map(path)
        size = len(mapped)
        source = pa.BufferReader(pa.py_buffer(mapped))
        try:
            reader = pa.ipc.open_stream(source)
            _check_schema(path, reader.schema)
            end = source.tell()
            while True:
                start = source.tell()
                try:
                    batch, metadata = reader.read_next_batch_with_custom_metadata()
                except StopIteration:
                    sealed = start == end and source.tell() - end == len(END_OF_STREAM)
                    problem = "" if sealed or source.tell() == end else "a request has no end"
                    break
                try:
                    size_of_header = 8 + int.from_bytes(mapped[start + 4 : start + 8], "little")
                    _check_size(batch, size_of_header, source.tell() - start)
                    text = _properties(metadata)
                    if text:
                        _decode(text)
                        at = start + mapped[start : start + size_of_header].tobytes().index(text)
                        checksum = xxhash.xxh3_64_intdigest(text)
                        places.append(Place(end, source.tell(), at, at + len(text), checksum))
                        end = source.tell()
                except _PARSE_ERRORS as error:
                    raise CaptureFileError(f"{path} is damaged after byte {end}: {error}") from None
        except CaptureFileError:
            raise
        except _PARSE_ERRORS as error:
            problem = str(error)
    if problem and not sealed and _goes_on(path, end, size):
        raise CaptureFileError(f"{path} is damaged after byte {end}: {problem}")
    return Scan(places, end, sealed)


def _has_its_sizes(line: Line) -> bool:
    site, (rows, width) = line.site, line.site.shape
    sizes = len(line.positions), len(line.token_ids), line.rows.size
    return sizes == (site.tokens, site.tokens, rows * width * DTYPES[site.dtype].itemsize)


def _map(path: Path | str) -> npt.NDArray[np.uint8]:
    """Map a file copy-on-write. Unlike Python's, torch's mapping holds no file descriptor."""
    with open(path, "rb") as file:
        name, size = f"/proc/self/fd/{file.fileno()}", os.fstat(file.fileno()).st_size
        try:
            storage = torch.UntypedStorage.from_file(name, False, size)
        except RuntimeError as error:
            raise OSError(f"{path} cannot be mapped: {error}") from None
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[arg-type]


def _check_schema(path: Path | str, schema: Any) -> None:
    metadata = schema.metadata or {}
    if metadata.get(b"format") != FORMAT.encode():
        raise CaptureFileError(f"{path} is not a capture file but another Arrow stream")
    if metadata.get(b"version") != VERSION.encode():
        version = metadata.get(b"version", b"").decode(errors="replace")
        raise CaptureFileError(f"{path} has format version {version}; supported: {VERSION}")
    if not schema.equals(SCHEMA):
        raise CaptureFileError(f"{path} is damaged: it has other columns than a capture file")


def _check_size(batch: Any, size_of_header: int, size: int) -> None:
    """Raise ValueError if a message is longer than its batch, and so hides those that follow."""
    buffers = (buffer for column in batch.columns for buffer in column.buffers() if buffer is not None)
    if size != size_of_header + sum(-(-buffer.size // 8) * 8 for buffer in buffers):
        raise ValueError("the length of a message differs from its content")


def _properties(metadata: Any) -> bytes:
    """Return the text with the properties of a request; it is empty in a batch that is not the request's last."""
    text: bytes = b"" if metadata is None else metadata[REQUEST]
    if metadata is None or xxhash.xxh3_64_hexdigest(text).encode() != metadata[CHECKSUM]:
        raise ValueError("the checksum of the properties differs")
    return text


def _decode(text: bytes) -> StreamEntry:
    entry = msgspec.json.decode(text, type=StreamEntry)
    if any(site.dtype not in DTYPES or min(site.shape) < 0 for site in entry.sites):
        raise ValueError("a site has an unknown dtype or shape")
    return entry


def _goes_on(path: Path | str, end: int, size: int) -> bool:
    """Return whether more follows behind ``end`` than one request that a killed writer left incomplete.

    That is the case if a complete request or the end-of-stream marker follows. Reads the bytes instead of mapping them,
    because a writer that fails cuts them off. Ignores what a running writer has appended to the ``size`` bytes that
    were scanned.
    """
    with open(path, "rb") as file:
        file.seek(end)
        rest = file.read(size - end)
    if rest.endswith(END_OF_STREAM):
        return True
    words = np.frombuffer(rest[: len(rest) // 8 * 8], "<u4").reshape(-1, 2)
    starts = np.flatnonzero((words[:, 0] == 0xFFFFFFFF) & (words[:, 1] > 0) & (words[:, 1] < _MAX_METADATA)) * 8
    for start in starts[starts > 0].tolist():
        try:
            reader = pa.ipc.open_stream(_HEADER + rest[start:])
            _, metadata = reader.read_next_batch_with_custom_metadata()
            if text := _properties(metadata):
                _decode(text)
                return True
        except (*_PARSE_ERRORS, StopIteration, TypeError):
            continue
    return False

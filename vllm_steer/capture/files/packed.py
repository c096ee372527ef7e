# SPDX-License-Identifier: Apache-2.0
"""Files of many requests, only ever appended to, which appear when they are complete.

The header of a safetensors file comes first and lists all tensors, so it is written last, into room kept for it, and
the rows of all requests are laid end to end in few tensors: ``rows.0``, and a further one each time that dtype or width
change. The index of the requests, which has no bound, is a tensor at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm_steer.capture.consumers.base import THREAD_PREFIX
from vllm_steer.capture.files.directory import CaptureDirectory, CaptureWriteError
from vllm_steer.capture.files.format import (
    ALIGNMENT,
    INDEX,
    POSITIONS,
    TOKEN_IDS,
    Ints,
    SiteEntry,
    TensorEntry,
    Tokens,
    checked_dtype,
    encode_header,
    raw,
    request_entry,
)
from vllm_steer.capture.files.layouts import FileLayout, LayoutName, Window, timestamped_stem
from vllm_steer.capture.results import CapturedRequest, Site, SiteRows

logger = logging.getLogger("vllm_steer.capture")

HEADER_SIZE = 64 << 10
MAX_TENSORS = 512
"""As many tensors as the header has room for, beside the five at the end."""
_LISTED = msgspec.json.Encoder()


class Windowed(FileLayout):
    """One open file at a time; it is completed when its window says so, also while no request comes."""

    def __init__(self, folder: CaptureDirectory, name: LayoutName, window: Window) -> None:
        self._folder = folder
        self._name = name
        self._window = window
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._timer: threading.Timer | None = None
        self._opened = 0

    def write(self, captured: CapturedRequest, tag: str | None) -> dict[str, Any]:
        """Append the request; disk space for completing the file is there when this returns."""
        blocks = _blocks(captured)
        with self._lock:
            if self._file is not None and not (self._file.has_room(blocks) and self._file.is_in_root()):
                self._complete_or_log()
            file = self._file or self._open()
            try:
                index = file.append(captured, blocks, tag)
            except CaptureWriteError:
                # What is in the file already is safe only when it has appeared, so that is done at once.
                self._complete_or_log()
                raise
            sealed = self._is_full(file)
            if sealed:
                self._complete()
            return {"path": str(file.path), "index": index, "sealed": sealed}

    def close(self) -> None:
        with self._lock:
            self._complete()

    def _open(self) -> OpenFile:
        # Files are read in the order of their names, so each name is a later one, also where the clock is set back.
        self._opened = max(time.time_ns(), self._opened + 1)
        file = self._file = OpenFile(self._folder, timestamped_stem(self._name, self._opened))
        if self._window.max_seconds is not None:
            self._timer = threading.Timer(self._window.max_seconds, self._expire, (file,))
            self._timer.daemon = True
            self._timer.name = f"{THREAD_PREFIX}timer"
            self._timer.start()
        return file

    def _is_full(self, file: OpenFile) -> bool:
        requests, size = self._window.max_requests, self._window.max_size
        return (requests is not None and file.num_requests >= requests) or (size is not None and file.size >= size)

    def _expire(self, file: OpenFile) -> None:
        with self._lock:
            if self._file is file:
                self._complete_or_log()

    def _complete_or_log(self) -> None:
        try:
            self._complete()
        except CaptureWriteError:
            return  # logged, and nobody waits for it

    def _complete(self) -> None:
        file, self._file = self._file, None
        if self._timer is not None:
            self._timer.cancel()
        if file is None:
            return
        try:
            file.complete()
        except Exception as error:
            logger.error("%s is lost, with captures of %d requests: %s", file.path, file.num_requests, error)
            raise


class OpenFile:
    """The file that is being appended to. An append that fails leaves it as it was."""

    def __init__(self, folder: CaptureDirectory, stem: str) -> None:
        self._part = folder.create(stem)
        self.path = self._part.path
        self._runs: list[TensorEntry] = []
        self._tokens: list[dict[str, Ints]] = []
        self._num_tokens = 0
        self._index: list[bytes] = []
        self._index_size = 2

    @property
    def num_requests(self) -> int:
        """Requests in it."""
        return len(self._index)

    @property
    def size(self) -> int:
        """Bytes of rows and tokens in it."""
        return self._end() + 8 * self._num_tokens

    def has_room(self, blocks: Sequence[Block]) -> bool:
        """Whether the header can list the tensors of these rows as well."""
        kinds = len({block.kind for block in blocks})
        return len(self._runs) + 2 * kinds <= MAX_TENSORS

    def is_in_root(self) -> bool:
        """Whether it will appear in the folder that is the root now; one that was moved takes it along."""
        return self._part.is_in_root()

    def append(self, captured: CapturedRequest, blocks: Sequence[Block], tag: str | None) -> int:
        """Add one request, whose rows are ``blocks``; its place in the index.

        Raises:
            CaptureWriteError: it cannot be written.
            ValueError: its rows are of too many dtypes and widths.
        """
        if not self.has_room(blocks):
            raise ValueError(f"captured rows are of more than {MAX_TENSORS // 2} dtypes and widths")
        runs, tokens = list(self._runs), Tokens(self._num_tokens)
        sites: list[SiteEntry] = []
        buffers: list[memoryview | bytes] = []
        for kind, (point, layer), there in blocks:
            data, count = raw(there.rows), there.rows.shape[0]
            tensor, first, padding = _extend(runs, kind, count, data.nbytes)
            if padding:
                buffers.append(bytes(padding))
            buffers.append(data)
            at = tokens.add(captured, there.positions)
            sites.append(SiteEntry(point, layer, kind.dtype, tensor, (first, first + count), at))
        entry = _LISTED.encode(request_entry(captured, sites, tag))
        end = runs[-1].stop if runs else 0
        index_size = self._index_size + len(entry) + 1
        # All that completing it needs is reserved now, when a refusal can still be told.
        self._part.reserve(HEADER_SIZE + end + 8 * tokens.stop + index_size + 4 * ALIGNMENT)
        self._part.write(buffers, HEADER_SIZE + self._end())
        self._runs, self._num_tokens, self._index_size = runs, tokens.stop, index_size
        self._tokens.append(tokens.arrays())
        self._index.append(entry)
        return len(self._index) - 1

    def complete(self) -> None:
        """Let it appear, or, where nothing is in it, remove it. Raises CaptureWriteError."""
        if not self._index:
            self._part.discard()
            return
        try:
            runs = list(self._runs)
            buffers: list[memoryview | bytes] = []
            for name in (POSITIONS, TOKEN_IDS):
                values = np.concatenate([tokens[name] for tokens in self._tokens])
                buffers += [bytes(_pad(runs)), values.view(np.uint8).data]
                _append(runs, name, "I32", values.shape, values.nbytes)
            index = b"[" + b",".join(self._index) + b"]"
            buffers += [bytes(_pad(runs)), index]
            _append(runs, INDEX, "U8", (len(index),), len(index))
            self._part.write(buffers, HEADER_SIZE + self._end())
            self._part.write([encode_header(runs, {}, HEADER_SIZE)], 0)
        except BaseException:
            self._part.discard()
            raise
        self._part.publish(HEADER_SIZE + runs[-1].stop)

    def _end(self) -> int:
        return self._runs[-1].stop if self._runs else 0


class RowKind(NamedTuple):
    """What rows in one tensor have in common."""

    dtype: str
    width: int


class Block(NamedTuple):
    """The rows of one site."""

    kind: RowKind
    site: Site
    there: SiteRows


def _blocks(captured: CapturedRequest) -> list[Block]:
    """The request's rows, those of a kind together; raises as `checked_dtype`."""
    blocks = [
        Block(RowKind(checked_dtype(there), there.rows.shape[1]), site, there) for site, there in captured.sites.items()
    ]
    return sorted(blocks, key=itemgetter(0))


def _extend(runs: list[TensorEntry], kind: RowKind, count: int, size: int) -> tuple[str, int, int]:
    """Make room for ``count`` rows in the last tensor or a new one: its name, their first row in it, padding bytes."""
    last = runs[-1] if runs else None
    if last is not None and last.name.startswith("rows") and (last.dtype, last.shape[1]) == kind:
        first = last.shape[0]
        runs[-1] = TensorEntry(last.name, last.dtype, (first + count, kind.width), last.start, last.stop + size)
        return last.name, first, 0
    padding = _pad(runs)
    name = f"rows.{len(runs)}"
    _append(runs, name, kind.dtype, (count, kind.width), size)
    return name, 0, padding


def _pad(runs: list[TensorEntry]) -> int:
    """Align what comes next: safetensors knows no gaps, so a tensor fills it; its size."""
    padding = -runs[-1].stop % ALIGNMENT if runs else 0
    if padding:
        _append(runs, f"pad.{len(runs)}", "U8", (padding,), padding)
    return padding


def _append(runs: list[TensorEntry], name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
    start = runs[-1].stop if runs else 0
    runs.append(TensorEntry(name, dtype, shape, start, start + size))

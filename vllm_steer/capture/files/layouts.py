# SPDX-License-Identifier: Apache-2.0
"""File layouts: how requests are distributed over files. Here: the interface, and one file per request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import msgspec
import numpy as np

from vllm_steer.capture.files.directory import CaptureDirectory
from vllm_steer.capture.files.format import (
    SiteEntry,
    TensorEntry,
    TokenTable,
    dtype_name,
    encode_header,
    hashed_stem,
    request_entry,
    row_bytes,
)
from vllm_steer.capture.results import CapturedRequest

LayoutName = Literal["per_request", "packed", "sharded"]


class FileLayout(ABC):
    """Writer of requests into a directory. Methods that raise CaptureWriteError leave no partial file behind."""

    @abstractmethod
    def write(self, captured: CapturedRequest, tag: str | None) -> dict[str, Any]:
        """Write one request.

        Returns:
            The ``path`` of the file, the ``index`` of the request in the file, and whether the file is ``sealed``, that
            is, complete. A file appears under its path when it is sealed.

        Raises:
            CaptureWriteError: The request cannot be written.
        """

    def close(self) -> None:
        """Seal the open file, if any."""
        return None


class PerRequestLayout(FileLayout):
    """One file per sample of a request, named by the hash of the request id."""

    def __init__(self, directory: CaptureDirectory) -> None:
        self._directory = directory

    def write(self, captured: CapturedRequest, tag: str | None) -> dict[str, Any]:
        """Write one request to a file of its own."""
        buffers = encode_request(captured, tag)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        file = self._directory.create(hashed_stem(captured.request_id, captured.sample))
        try:
            file.reserve(size)
            file.write(buffers, 0)
        except BaseException:
            file.discard()
            raise
        file.publish(size)
        return {"path": str(file.path), "index": 0, "sealed": True}


def encode_request(captured: CapturedRequest, tag: str | None = None) -> list[memoryview | bytes]:
    """Return the contents of a file with one request.

    Row tensors are named ``point.layer``; the index is in the metadata.
    """
    tokens = TokenTable()
    sites: list[SiteEntry] = []
    parts: list[tuple[int, str, str, tuple[int, ...], memoryview]] = []
    for (point, layer), site in captured.sites.items():
        name, dtype, rows = f"{point}.{layer}", dtype_name(site), site.rows
        sites.append(SiteEntry(point, layer, dtype, name, (0, rows.shape[0]), tokens.add(captured, site.positions)))
        parts.append((rows.element_size(), name, dtype, tuple(rows.shape), row_bytes(rows)))
    for name, values in tokens.arrays().items():
        parts.append((values.itemsize, name, "I32", values.shape, values.view(np.uint8).data))
    parts.sort(key=lambda part: -part[0])  # wider elements first: every tensor is aligned without padding
    tensors: list[TensorEntry] = []
    for _, name, dtype, shape, data in parts:
        start = tensors[-1].stop if tensors else 0
        tensors.append(TensorEntry(name, dtype, shape, start, start + data.nbytes))
    index = msgspec.json.encode([request_entry(captured, sites, tag)]).decode()
    return [encode_header(tensors, {"requests": index}), *(data for *_, data in parts)]

# SPDX-License-Identifier: Apache-2.0
"""How requests are laid out in files: one file for each, or many in one until it is full or old enough."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np

from vllm_steer.capture.files.directory import CaptureDirectory
from vllm_steer.capture.files.format import (
    SiteEntry,
    TensorEntry,
    Tokens,
    checked_dtype,
    encode_header,
    hashed_stem,
    raw,
    request_entry,
)
from vllm_steer.capture.results import CapturedRequest

LayoutName = Literal["per_request", "packed", "sharded"]


@dataclass(frozen=True, slots=True)
class Window:
    """When a file of many requests is complete: at the first of these; None for no such limit."""

    max_requests: int | None
    max_size: int | None
    """Bytes of rows and tokens, at which the file is complete: one request can take it far over."""
    max_seconds: float | None
    """Since its first request."""


WINDOWS: Mapping[LayoutName, Window] = MappingProxyType(
    {
        "packed": Window(max_requests=256, max_size=256 << 20, max_seconds=10.0),
        "sharded": Window(max_requests=None, max_size=1 << 30, max_seconds=300.0),
    }
)
"""The layouts of many requests to a file, and their limits where the operator sets none."""


class FileLayout(ABC):
    """Writes requests into a folder. Every method raises CaptureWriteError, and then has left no half file."""

    @abstractmethod
    def write(self, captured: CapturedRequest, tag: str | None) -> dict[str, Any]:
        """Write one request.

        Returns:
            ``path`` of its file, its ``index`` among the file's requests, and whether the file is ``sealed``: there,
            complete and never written to again. One that is not appears when it is.
        """

    def close(self) -> None:
        """Complete what is open."""
        return None


def timestamped_stem(name: str, moment: int) -> str:
    """A file name that sorts by ``moment``, in ns since 1970, and is nobody else's."""
    seconds, rest = divmod(moment, 10**9)
    return f"{name}-{time.strftime('%Y%m%dt%H%M%S', time.gmtime(seconds))}-{rest:09d}-{secrets.token_hex(4)}"


class PerRequest(FileLayout):
    """A file for each sample of each request, named by the hash of the request's id."""

    def __init__(self, folder: CaptureDirectory) -> None:
        self._folder = folder

    def write(self, captured: CapturedRequest, tag: str | None) -> dict[str, Any]:
        """Row tensors are called ``point.layer``; the index is in the metadata."""
        tokens = Tokens(0)
        sites: list[SiteEntry] = []
        parts: list[tuple[int, str, str, tuple[int, ...], memoryview]] = []
        for (point, layer), site in captured.sites.items():
            name, dtype, rows = f"{point}.{layer}", checked_dtype(site), site.rows
            at = tokens.add(captured, site.positions)
            sites.append(SiteEntry(point, layer, dtype, name, (0, rows.shape[0]), at))
            parts.append((rows.element_size(), name, dtype, tuple(rows.shape), raw(rows)))
        for name, values in tokens.arrays().items():
            parts.append((values.itemsize, name, "I32", values.shape, values.view(np.uint8).data))
        parts.sort(key=lambda part: -part[0])  # larger elements first: then all are aligned, without gaps
        tensors: list[TensorEntry] = []
        for _, name, dtype, shape, data in parts:
            start = tensors[-1].stop if tensors else 0
            tensors.append(TensorEntry(name, dtype, shape, start, start + data.nbytes))
        index = msgspec.json.encode([request_entry(captured, sites, tag)]).decode()
        header = encode_header(tensors, {"requests": index})
        size = len(header) + tensors[-1].stop
        file = self._folder.create(hashed_stem(captured.request_id, captured.sample))
        try:
            file.reserve(size)
            file.write([header, *(data for *_, data in parts)], 0)
        except BaseException:
            file.discard()
            raise
        file.publish(size)
        return {"path": str(file.path), "index": 0, "sealed": True}

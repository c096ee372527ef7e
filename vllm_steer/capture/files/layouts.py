# SPDX-License-Identifier: Apache-2.0
"""File layouts: how requests are distributed over files. Here: the interface, and one file per request."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any, Literal

from vllm_steer.capture.files.directory import CaptureDirectory
from vllm_steer.capture.files.format import hashed_stem
from vllm_steer.capture.files.tensors import SUFFIX, encode_request
from vllm_steer.capture.results import CapturedRequest

LayoutName = Literal["per_request", "packed", "sharded"]


class FileLayout(ABC):
    """Writer of requests into a directory."""

    @abstractmethod
    def write(self, captured: CapturedRequest) -> dict[str, Any]:
        """Write one request.

        Returns:
            The ``path`` of the file, the ``index`` of the request in the file, and whether the file is ``sealed``, that
            is, whether nothing will be appended. The request can be read as soon as this returns.

        Raises:
            CaptureWriteError: The request cannot be written. Earlier requests are not affected.
        """

    def close(self) -> None:
        """Seal the open file, if any."""
        return None


class PerRequestLayout(FileLayout):
    """One file per sample of a request, named by the hash of the request id."""

    def __init__(self, directory: CaptureDirectory, run: str | None = None) -> None:
        self._directory = directory
        self._run = run

    def write(self, captured: CapturedRequest) -> dict[str, Any]:
        """Write one request to a file of its own."""
        buffers = encode_request(captured, self._run)
        file = self._directory.create(hashed_stem(captured.request_id, captured.sample), SUFFIX, hidden=True)
        try:
            file.append(buffers)
        except BaseException:
            file.discard()
            raise
        file.publish()
        return {"path": str(file.path), "index": 0, "sealed": True}


def timestamped_stem(name: str, time_ns: int, ending: str | None = None) -> str:
    """Return an unguessable file name without suffix that sorts by time.

    Args:
        name: Beginning of the name.
        time_ns: Nanoseconds since 1970.
        ending: 8 hexadecimal digits; random by default.
    """
    seconds, nanoseconds = divmod(time_ns, 10**9)
    stamp = time.strftime("%Y%m%dt%H%M%S", time.gmtime(seconds))
    return f"{name}-{stamp}-{nanoseconds:09d}-{ending or secrets.token_hex(4)}"

# SPDX-License-Identifier: Apache-2.0
"""Consumer that writes safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter

from vllm_steer.capture.consumers.base import Consumer
from vllm_steer.capture.files.directory import CaptureDirectory
from vllm_steer.capture.files.layouts import FileLayout, LayoutName, PerRequestLayout
from vllm_steer.capture.files.rotation import ROTATION_LIMITS, RotatingLayout
from vllm_steer.capture.results import CapturedRequest
from vllm_steer.errors import SteeringError

_ByteCount = Annotated[
    int, BeforeValidator(lambda value: int(TypeAdapter(ByteSize).validate_python(value))), Field(gt=0)
]
_Count = Annotated[int, Field(gt=0)]
_Seconds = Annotated[float, Field(gt=0, le=86400)]


class FilesystemConsumer(Consumer):
    """Writes requests to files in a directory, which `vllm_steer.capture.files.reader` reads.

    Layouts:

    * ``per_request``: one file per sample of a request, which exists when its status is known.
    * ``packed``: a new file every 256 requests, 256 MiB or 10 s, whichever comes first.
    * ``sharded``: a new file every 1 GiB or 300 s.

    In ``packed`` and ``sharded``, status ``ok`` means that the rows are in the open file and that the disk space to
    complete it is reserved. The file appears when it is complete. If the process is killed or the directory removed
    before that, its rows are lost.
    """

    name: ClassVar[str] = "filesystem"
    spec_options: ClassVar[Mapping[str, Any]] = MappingProxyType({"tag": Annotated[str, Field(max_length=1024)]})

    def __init__(
        self,
        *,
        root: str,
        layout: LayoutName = "per_request",
        fsync: bool = False,
        quota: _ByteCount | None = None,
        max_requests: _Count | None = None,
        max_size: _ByteCount | None = None,
        max_seconds: _Seconds | None = None,
    ) -> None:
        """Open the directory. Sizes are bytes and accept units, as in ``100GiB``.

        Args:
            root: Directory of the files; created if it does not exist.
            layout: ``"per_request"``, ``"packed"`` or ``"sharded"``.
            fsync: Sync each file to disk before it appears.
            quota: Most bytes in the directory: files found at the start and files written by this process. Requests
                beyond the quota get status ``error``.
            max_requests: Start a new file after this many requests, instead of the layout's limit.
            max_size: Start a new file after this many bytes.
            max_seconds: Start a new file this long after the first request of the open one.

        Raises:
            SteeringError: The directory is not writable, or a limit is given for ``per_request``.
        """
        limits = {"max_requests": max_requests, "max_size": max_size, "max_seconds": max_seconds}
        given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
        if layout == "per_request" and given:
            raise SteeringError(next(iter(given)), "has no effect with layout per_request; use packed or sharded")
        directory = CaptureDirectory(root, fsync=fsync, quota=quota)
        self._layout: FileLayout
        if layout == "per_request":
            self._layout = PerRequestLayout(directory)
        else:
            self._layout = RotatingLayout(directory, layout, replace(ROTATION_LIMITS[layout], **given))

    def accept(self, captured: CapturedRequest) -> dict[str, Any]:
        """Write one request.

        Returns:
            The ``path`` of the file, the ``index`` of the request in the file, and whether the file is ``sealed``, that
            is, complete and visible.

        Raises:
            CaptureWriteError: The disk or the quota is full, or the directory is missing or not writable.
        """
        return self._layout.write(captured, captured.spec.options.get("tag"))

    def close(self) -> None:
        """Complete the open file."""
        self._layout.close()

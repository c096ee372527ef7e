# SPDX-License-Identifier: Apache-2.0
"""The consumer that writes safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter

from vllm_steer.capture.consumers.base import Consumer
from vllm_steer.capture.files.directory import CaptureDirectory
from vllm_steer.capture.files.layouts import WINDOWS, FileLayout, LayoutName, PerRequest, Window
from vllm_steer.capture.files.packed import Windowed
from vllm_steer.capture.results import CapturedRequest
from vllm_steer.errors import SteeringError

Size = Annotated[int, BeforeValidator(lambda value: int(TypeAdapter(ByteSize).validate_python(value))), Field(gt=0)]
"""Bytes, also written with a unit: ``100GiB``."""
Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class FilesystemConsumer(Consumer):
    """Writes requests to a folder, which `vllm_steer.capture.files.reader` reads.

    ``per_request``
        a file for each sample of a request, there when its status is.
    ``packed``
        a file for every 256 requests, 256 MiB or 10 s, whichever is first.
    ``sharded``
        a file for every 1 GiB or 300 s.

    In the latter two, ``ok`` says that the rows are in the open file and the disk space to complete it is reserved. It
    appears when it is complete; should the process be killed before, or the folder be taken away, it is lost.
    """

    name: ClassVar[str] = "filesystem"
    spec_options: ClassVar[Mapping[str, Any]] = MappingProxyType({"tag": Annotated[str, Field(max_length=1024)]})

    def __init__(
        self,
        *,
        root: str,
        layout: LayoutName = "per_request",
        fsync: bool = False,
        quota: Size | None = None,
        max_requests: Count | None = None,
        max_size: Size | None = None,
        max_seconds: Seconds | None = None,
    ) -> None:
        """Open the root.

        Args:
            root: the folder; it is made if it is not there.
            layout: ``"per_request"``, ``"packed"`` or ``"sharded"``.
            fsync: wait until a file is on the disk before it appears.
            quota: most bytes in the root. Counted are the files that are there at the start and those written by this
                process; beyond it, requests get status ``error``.
            max_requests: complete a file of many requests after so many, in place of the layout's own limit.
            max_size: after so many bytes.
            max_seconds: so long after its first request.

        Raises:
            SteeringError: the root cannot be written to, or a limit is given for ``per_request``, which has none.
        """
        limits = {"max_requests": max_requests, "max_size": max_size, "max_seconds": max_seconds}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if layout == "per_request" and given:
            raise SteeringError(
                next(iter(given)), f"is for {' and '.join(WINDOWS)}; per_request has a file for each request"
            )
        folder = CaptureDirectory(root, fsync=fsync, quota=quota)
        self._layout: FileLayout
        if layout == "per_request":
            self._layout = PerRequest(folder)
        else:
            own = WINDOWS[layout]
            self._layout = Windowed(
                folder,
                layout,
                Window(
                    max_requests if max_requests is not None else own.max_requests,
                    max_size if max_size is not None else own.max_size,
                    max_seconds if max_seconds is not None else own.max_seconds,
                ),
            )

    def accept(self, captured: CapturedRequest) -> dict[str, Any]:
        """Write one request.

        Returns:
            ``path`` of its file, its ``index`` among the file's requests, and whether the file is ``sealed``, which
            is to say already there.

        Raises:
            CaptureWriteError: the disk or the quota is full, the root has vanished or cannot be written to.
        """
        return self._layout.write(captured, captured.spec.options.get("tag"))

    def close(self) -> None:
        """Complete the open file."""
        self._layout.close()

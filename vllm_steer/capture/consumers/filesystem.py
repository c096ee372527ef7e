# SPDX-License-Identifier: Apache-2.0
"""Consumer that writes files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter

from vllm_steer.capture.consumers.base import Consumer
from vllm_steer.capture.files.directory import CaptureDirectory, CaptureWriteError
from vllm_steer.capture.files.format import escape_surrogates
from vllm_steer.capture.files.journal import SubmissionJournal
from vllm_steer.capture.files.layouts import FileLayout, LayoutName, PerRequestLayout, timestamped_stem
from vllm_steer.capture.files.rotation import ROTATION_LIMITS, RotatingLayout
from vllm_steer.capture.files.run_lock import RunLock
from vllm_steer.capture.results import CapturedRequest, SubmittedRequest
from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import shown

_ByteCount = Annotated[
    int, BeforeValidator(lambda value: int(TypeAdapter(ByteSize).validate_python(value))), Field(gt=0)
]
_Count = Annotated[int, Field(gt=0)]
_Seconds = Annotated[float, Field(gt=0, le=86400)]


class FilesystemConsumer(Consumer):
    """Writes requests to files in a directory, which `vllm_steer.open_captures` reads.

    Layouts:

    * ``per_request``: one safetensors file per sample of a request.
    * ``packed``: Arrow IPC streams; a new file every 256 requests, 256 MiB or 10 s, whichever comes first.
    * ``sharded``: Arrow IPC streams; a new file every 1 GiB or 300 s.

    In each layout, a request with status ``ok`` or ``partial`` can be read at once by other processes, and survives if
    all processes are killed. With ``fsync`` it also survives a power failure.
    """

    name: ClassVar[str] = "filesystem"
    spec_options: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"tag": Annotated[str, Field(max_length=1024)], "layout": LayoutName}
    )

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
        run: Annotated[str, Field(min_length=1, max_length=1024)] | None = None,
        resume: bool = False,
    ) -> None:
        """Open the directory. Sizes are bytes and accept units, as in ``100GiB``.

        Args:
            root: Directory of the files; created if it does not exist. A leading ``~`` is the home directory.
            layout: ``"per_request"``, ``"packed"`` or ``"sharded"``.
            fsync: Sync each request to disk before its status is reported.
            quota: Most bytes in the directory: files found at the start and files written by this process. Requests
                beyond the quota get status ``error``.
            max_requests: Start a new file after this many requests, instead of the layout's limit.
            max_size: Start a new file after this many bytes.
            max_seconds: Start a new file this long after the first request of the open one.
            run: Name of the run, stored with each request; by default the time of the start with a random ending. Each
                start needs another name, unless ``resume`` is set. With several API servers, ``-NUMBER`` of the server
                is appended.
            resume: If the directory has the run, go on with it: requests are numbered from its last one. For servers
                that are restarted with the same options.

        Raises:
            SteeringError: The directory is not writable, it has a run with this name and ``resume`` is not set, or an
                option has no effect.
        """
        limits = {"max_requests": max_requests, "max_size": max_size, "max_seconds": max_seconds}
        given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
        if layout == "per_request" and given:
            raise SteeringError(next(iter(given)), "has no effect with layout per_request; use packed or sharded")
        if resume and run is None:
            raise SteeringError("resume", "has no effect without run; give the run a name")
        directory = CaptureDirectory(root, fsync=fsync, quota=quota)
        self._lock = None if run is None else RunLock(directory, escape_surrogates(run), resume=resume)
        self._first = 0 if self._lock is None else self._lock.next_submission
        run = timestamped_stem("run", time.time_ns()) if run is None else escape_surrogates(run)
        self._journal = SubmissionJournal(directory, run)
        self._directory, self._run = directory, run
        self._default: LayoutName = layout
        self._layouts: dict[LayoutName, FileLayout] = {}
        self._open(layout, given)

    def _open(self, layout: LayoutName, limits: Mapping[str, Any]) -> FileLayout:
        """Return the writer of a layout, with its limits for new files."""
        opened: FileLayout
        if layout == "per_request":
            opened = PerRequestLayout(self._directory, self._run)
        else:
            opened = RotatingLayout(self._directory, layout, replace(ROTATION_LIMITS[layout], **limits), self._run)
        self._layouts[layout] = opened
        return opened

    def start(self, model: str) -> None:
        """Refuse to resume a run of another model."""
        models = set() if self._lock is None else self._lock.models - {escape_surrogates(model)}
        if models:
            raise SteeringError(
                "run",
                f"{shown(self._run)} has requests of the model {shown(min(models))}, not {shown(model)}; "
                "choose another name, or leave it out",
            )

    def begin(self, submitted: SubmittedRequest) -> None:
        """Add the request to the journal of submitted requests."""
        if self._first:
            submitted = replace(submitted, submission=self._first + submitted.submission)
        self._journal.add(submitted)

    def accept(self, captured: CapturedRequest) -> dict[str, Any]:
        """Write one request.

        Returns:
            The ``path`` of the file, the ``index`` of the request in the file, and whether the file is ``sealed``, that
            is, whether nothing will be appended. The request can be read at once.

        Raises:
            CaptureWriteError: The disk or the quota is full, or the directory is missing or not writable.
        """
        if self._first and captured.submission is not None:
            captured = replace(captured, submission=self._first + captured.submission)
        try:
            layout: LayoutName = captured.spec.options.get("layout", self._default)
            return (self._layouts.get(layout) or self._open(layout, {})).write(captured)
        except Exception as error:
            if captured.submission is not None:
                submitted = SubmittedRequest(captured.request_id, captured.sample, captured.submission, captured.spec)
                with suppress(CaptureWriteError):
                    self._journal.add(submitted, str(error))
            raise

    def close(self) -> None:
        """Complete the open files."""
        for layout in self._layouts.values():
            layout.close()
        self._journal.close()
        if self._lock is not None:
            self._lock.release()

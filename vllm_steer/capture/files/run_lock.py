# SPDX-License-Identifier: Apache-2.0
"""Exclusive use of a run's name in a directory.

Requests are numbered from 0 in each run. Two runs with one name would mix their requests, and a request that one of
them lost would count as stored if the other has the same number and id. A resumed run goes on with the next number.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from contextlib import suppress

from vllm_steer.capture.files.directory import CaptureDirectory
from vllm_steer.capture.files.format import CaptureFileError
from vllm_steer.capture.files.journal import read_journals
from vllm_steer.capture.files.reader import Captures
from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import shown

_ADVICE = "choose another name, or leave it out"


class RunLock:
    """Lock of a run's name, held until `release`. A killed process leaves an empty file without a lock."""

    def __init__(self, directory: CaptureDirectory, run: str, *, resume: bool = False, advice: str = _ADVICE) -> None:
        """Lock the name.

        Args:
            directory: Directory of the run's files.
            run: The name.
            resume: Whether to go on with a run of this name.
            advice: What to do if the name is not free: the end of the error.

        Raises:
            SteeringError: A running process uses the name, the directory has it and ``resume`` is not set, or the
                directory cannot be read.
        """
        self.next_submission = 0
        """Number of the run's next request."""
        self.models: frozenset[str] = frozenset()
        """Models of the run's stored requests."""
        digest = hashlib.blake2b(run.encode(), digest_size=16).hexdigest()
        self._path = directory.path / f".{digest}.run"
        try:
            self._fd: int | None = self._lock()
        except BlockingIOError:
            raise SteeringError(
                "run", f"a running process writes the run {shown(run)} in {directory.path}; end it, {advice}"
            ) from None
        except OSError as error:
            raise SteeringError("run", f"cannot lock {self._path}: {error.strerror}; {advice}") from None
        try:
            if resume:
                self._read(directory, run)
            elif any(entry.run == run for entry in read_journals(directory.path)):
                raise SteeringError(
                    "run",
                    f"{directory.path} already has requests of a run {shown(run)}; {advice}, or set resume=true",
                )
        except (CaptureFileError, OSError) as error:
            self.release()
            raise SteeringError(
                "run", f"cannot read the runs of the directory: {error}; move that file away, {advice}"
            ) from None
        except BaseException:
            self.release()
            raise

    def _read(self, directory: CaptureDirectory, run: str) -> None:
        """Read the numbers and models of the run's requests. The journal lacks requests that it could not note."""
        numbers = (entry.submission for entry in read_journals(directory.path) if entry.run == run)
        last, models = max(numbers, default=-1), set()
        for request in Captures(directory.path, run):
            models.add(request.model)
            if request.submission is not None:
                last = max(last, request.submission)
        self.next_submission, self.models = last + 1, frozenset(models)

    def _lock(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # another process has released the name after we opened its file

    def release(self) -> None:
        """Release the name. Idempotent."""
        if self._fd is not None:
            with suppress(OSError):  # the directory was removed
                self._path.unlink()
            os.close(self._fd)
            self._fd = None

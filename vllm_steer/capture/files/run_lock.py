# SPDX-License-Identifier: Apache-2.0
"""Exclusive use of a run's name in a directory.

Requests are numbered from 0 in each run. Two runs with one name would mix their requests, and a request that one of
them lost would count as stored if the other has the same number and id.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from contextlib import suppress

from vllm_steer.capture.files.directory import CaptureDirectory
from vllm_steer.capture.files.format import CaptureFileError
from vllm_steer.capture.files.journal import read_journals
from vllm_steer.errors import SteeringError
from vllm_steer.spec.scalars import shown

_ADVICE = "choose another name, or leave it out"


class RunLock:
    """Lock of a run's name, held until `release`. A killed process leaves an empty file without a lock."""

    def __init__(self, directory: CaptureDirectory, run: str) -> None:
        """Lock the name.

        Raises:
            SteeringError: A running process uses the name, or a journal in the directory has it.
        """
        digest = hashlib.blake2b(run.encode(), digest_size=16).hexdigest()
        self._path = directory.path / f".{digest}.run"
        try:
            self._fd: int | None = self._lock()
        except BlockingIOError:
            raise SteeringError(
                "run", f"{shown(run)} is the run of another writer in {directory.path}; {_ADVICE}"
            ) from None
        except OSError as error:
            raise SteeringError("run", f"cannot lock {self._path}: {error.strerror}") from None
        try:
            if any(entry.run == run for entry in read_journals(directory.path)):
                raise SteeringError("run", f"{directory.path} already has requests of a run {shown(run)}; {_ADVICE}")
        except CaptureFileError as error:
            self.release()
            raise SteeringError("run", f"cannot read the runs of the directory: {error}; leave the name out") from None
        except BaseException:
            self.release()
            raise

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

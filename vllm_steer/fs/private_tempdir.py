# SPDX-License-Identifier: Apache-2.0
"""A temporary directory that belongs to one process and is removed when the process exits."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress

from vllm_steer.fs.dirfd import open_dir


def private_tempdir(prefix: str) -> str:
    """Return the path of a new temporary directory with mode 0700. It is removed when this process exits.

    The directory is locked for as long as the process lives, because systemd-tmpfiles removes temporary files that
    have not been used for some days but skips locked directories.
    """
    path = tempfile.mkdtemp(prefix=prefix)
    lock = open_dir(path)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_SH)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # forked children inherit this exit handler
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    atexit.register(remove)
    return path

# SPDX-License-Identifier: Apache-2.0
"""Entries of a folder that is held open: what a name is there, whatever becomes of the folder's path."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def exists(name: str, folder: int) -> bool:
    """Whether the folder with that descriptor has an entry of that name; a link counts as itself."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def identity(about: os.stat_result) -> tuple[int, int]:
    """Device and inode: the same for two looks at one file, and for nothing else while it is open."""
    return about.st_dev, about.st_ino


def hold(folder: str | Path) -> int:
    """A descriptor of ``folder`` with a lock on it: as long as it is open, systemd-tmpfiles, which clears what has lain
    unused for days among temporary files, passes over the folder and all in it."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks: then nothing else is different
        fcntl.flock(held, fcntl.LOCK_SH)
    return held

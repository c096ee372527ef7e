# SPDX-License-Identifier: Apache-2.0
"""Entries of a folder that is held open: what a name is there, whatever becomes of the folder's path."""

from __future__ import annotations

import os


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

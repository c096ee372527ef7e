# SPDX-License-Identifier: Apache-2.0
"""The key file: written by ``vllm-steer keys`` and read by servers.

The file must be a regular file that belongs to its user or to root. Other users must not have write permission. Its
group may read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.fs.dirfd import write_atomic
from vllm_steer.server.auth.keys import Key, check_key

VERSION = 1
MAX_BYTES = 1 << 22


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    keys: tuple[Key, ...]


def read_keys(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file.

    Raises:
        SteeringError: The file does not exist, is a link, is writable by others, or is not a valid key file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _check_private(os.fstat(descriptor), path)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SteeringError(str(path), f"cannot be read: {error.strerror or error}") from None
    return _parse(data, str(path))


@contextlib.contextmanager
def edit_keys(path: Path, *, create: bool = False) -> Iterator[Callable[[tuple[Key, ...]], None]]:
    """Lock the key file and yield a function that replaces its keys.

    Args:
        path: Path of the file.
        create: Whether the file may be missing.

    Raises:
        SteeringError: The file cannot be read or written, or is invalid before or after the change.
    """
    path = path.absolute()
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SteeringError(str(path.parent), f"cannot be opened: {error.strerror or error}") from None

    def write(keys: tuple[Key, ...]) -> None:
        data = msgspec.json.format(msgspec.json.encode(_File(VERSION, keys)), indent=2) + b"\n"
        _parse(data, str(path))
        try:
            write_atomic(path.name, data, folder)
        except OSError as error:
            raise SteeringError(str(path), f"cannot be written: {error.strerror or error}") from None

    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not create or os.path.lexists(path):
            read_keys(path)
        yield write
    finally:
        os.close(folder)


def _check_private(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SteeringError(str(path), "is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise SteeringError(str(path), "belongs to another user, who could add keys; use a file of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise SteeringError(str(path), f"has mode {mode}, which lets others add keys or read secrets; chmod 600 it")


def _parse(data: bytes, where: str) -> tuple[Key, ...]:
    if len(data) > MAX_BYTES:
        raise SteeringError(where, f"is larger than {MAX_BYTES} bytes")
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SteeringError(where, f"is not a valid key file: {error}") from None
    if file.version != VERSION:
        raise SteeringError(where, f"has version {file.version}; this package reads version {VERSION}")
    for i, key in enumerate(file.keys):
        check_key(key, f"{where}: keys[{i}]")
    for field in ("name", "sha256", "cache_salt"):
        values = [getattr(key, field) for key in file.keys]
        if len(set(values)) != len(values):
            raise SteeringError(where, f"contains two keys with the same {field}")
    return file.keys

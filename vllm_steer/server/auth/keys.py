# SPDX-License-Identifier: Apache-2.0
"""The file of API keys: who may do what, up to which limits.

A key is 256 random bits and is stored as their SHA-256. A slow hash would protect what people choose from being guessed
when the file leaks; nobody guesses 256 bits at any speed, and a slow hash would be paid on every request.

The file is written by ``vllm-steer keys``; a server reads it again when it has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import KEY_LIMITS
from vllm_steer.server.auth.rights import Right
from vllm_steer.spec.references import read_name

VERSION = 1
MODE = 0o600
PREFIX = "vsk-"
"""How keys begin, so that one that got into a log or a repository can be found."""
MAX_BYTES = 1 << 22
_SECRET_BYTES = 32
_HEX = frozenset("0123456789abcdef")


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key, as the file has it: all but the key itself."""

    name: str
    """Whose it is, for logs and for limits; unique."""
    sha256: str
    """Of the key, in hexadecimal digits."""
    cache_salt: str
    """Secret: requests with this key share prefix-cache blocks with each other and with nobody else."""
    rights: tuple[Right, ...] = ()
    limits: Mapping[str, int] = {}
    """Those of :data:`~vllm_steer.limits.KEY_LIMITS` in which it differs from the server's."""
    created: float = 0.0
    """In seconds since 1970."""

    def salt(self, own: str | None) -> str:
        """The cache salt of a request that brought ``own``: as secret as the key's, and another for each ``own``."""
        message = b"" if own is None else b"\x01" + own.encode("utf-8", "surrogatepass")
        return hmac.new(self.cache_salt.encode(), message, hashlib.sha256).hexdigest()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    keys: tuple[Key, ...]


def digest_of(secret: str) -> str:
    """What is stored of a key."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def make_key(name: str, rights: tuple[Right, ...], limits: Mapping[str, int]) -> tuple[Key, str]:
    """A new key and its secret, which is kept nowhere; raises SteeringError for a name or limit that cannot be."""
    secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    key = Key(name, digest_of(secret), secrets.token_urlsafe(_SECRET_BYTES), rights, dict(limits), time.time())
    _check(key, "key")
    return key, secret


def find(keys: tuple[Key, ...], secret: str) -> Key | None:
    """The key that ``secret`` is; every key is compared in full, whether one has been found or not."""
    digest, found = digest_of(secret), None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file.

    Raises:
        SteeringError: it is not there, is a link, is not its owner's alone to write, or is not a file of keys.
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
def changing(path: Path, *, make: bool = False) -> Iterator[Callable[[tuple[Key, ...]], None]]:
    """Keep other writers out; what is yielded takes the keys that are to be in the file. With ``make``, the file may be
    missing. Raises SteeringError."""
    path = path.absolute()
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SteeringError(str(path.parent), f"cannot be opened: {error.strerror or error}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not make or os.path.lexists(path):
            read_keys(path)
        yield lambda keys: _write(folder, path, keys)
    finally:
        os.close(folder)


def _write(folder: int, path: Path, keys: tuple[Key, ...]) -> None:
    data = msgspec.json.format(msgspec.json.encode(_File(VERSION, keys)), indent=2)
    _parse(data, str(path))
    temporary = f".{path.name}.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, MODE, dir_fd=folder)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, MODE)
            file.write(data + b"\n")
            file.flush()
            os.fsync(descriptor)
        os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise SteeringError(str(path), f"cannot be written: {error.strerror or error}") from None


def _check_private(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SteeringError(str(path), "is not a file")
    if status.st_uid not in (os.geteuid(), 0):
        raise SteeringError(str(path), "belongs to another user, who could add keys")
    if status.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise SteeringError(str(path), f"has mode {mode}: others could add keys or see its secrets; chmod 600 it")


def _parse(data: bytes, where: str) -> tuple[Key, ...]:
    if len(data) > MAX_BYTES:
        raise SteeringError(where, f"has over {MAX_BYTES} bytes")
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SteeringError(where, f"is no file of keys: {error}") from None
    if file.version != VERSION:
        raise SteeringError(where, f"has version {file.version}; this package reads {VERSION}")
    for i, key in enumerate(file.keys):
        _check(key, f"{where}: keys[{i}]")
    for field in ("name", "sha256", "cache_salt"):
        values = [getattr(key, field) for key in file.keys]
        if len(set(values)) != len(values):
            raise SteeringError(where, f"two keys have the same {field}")
    return file.keys


def _check(key: Key, where: str) -> None:
    read_name(key.name, f"{where}.name")
    if len(key.sha256) != 64 or not _HEX.issuperset(key.sha256):
        raise SteeringError(f"{where}.sha256", "must be 64 hexadecimal digits in lower case")
    if len(key.cache_salt) < _SECRET_BYTES:
        raise SteeringError(f"{where}.cache_salt", f"must be secret: at least {_SECRET_BYTES} random letters")
    for name, value in key.limits.items():
        limit = KEY_LIMITS.get(name)
        if limit is None:
            raise SteeringError(f"{where}.limits", f"{name[:40]!r} is none; there are {', '.join(KEY_LIMITS)}")
        if not limit.low <= value <= limit.high:
            raise SteeringError(f"{where}.limits.{name}", f"must be {limit.low} to {limit.high}, not {value}")

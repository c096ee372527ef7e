# SPDX-License-Identifier: Apache-2.0
"""API keys: generation, verification and cache salts.

A secret consists of 256 random bits, and the key file stores its SHA-256. A slow password hash would protect secrets
that can be guessed. These cannot, and every request would pay for it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import KEY_LIMITS
from vllm_steer.request.references import read_name
from vllm_steer.server.auth.rights import Right

PREFIX = "vsk-"
"""Prefix of all secrets, so that leaked ones can be found in logs and repositories."""
_SECRET_BYTES = 32
_HEX = frozenset("0123456789abcdef")


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An API key as stored in the key file, without its secret."""

    name: str
    """Unique name of the holder, for logs and error messages."""
    sha256: str
    """Hash of the secret, in hexadecimal digits."""
    cache_salt: str
    """Secret salt. Requests share prefix-cache blocks only with requests of the same key."""
    rights: tuple[Right, ...] = ()
    limits: Mapping[str, int] = {}
    """Limits that differ from the server's, by the names in :data:`~vllm_steer.limits.KEY_LIMITS`."""
    created: float = 0.0
    """In seconds since 1970."""

    def salt(self, own: str | None) -> str:
        """Return the cache salt of a request that has the salt ``own``: secret, and different for each ``own``."""
        message = b"" if own is None else b"\x01" + own.encode("utf-8", "surrogatepass")
        return hmac.new(self.cache_salt.encode(), message, hashlib.sha256).hexdigest()


def hash_secret(secret: str) -> str:
    """Return the hash under which a secret is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def generate_key(name: str, rights: tuple[Right, ...], limits: Mapping[str, int]) -> tuple[Key, str]:
    """Return a new key and its secret, which is not stored anywhere; raises ``SteeringError``."""
    secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    key = Key(name, hash_secret(secret), secrets.token_urlsafe(_SECRET_BYTES), rights, dict(limits), time.time())
    check_key(key, "key")
    return key, secret


def find_key(keys: Sequence[Key], secret: str) -> Key | None:
    """Return the key with that secret. Compares with every key in constant time."""
    digest, found = hash_secret(secret), None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def check_key(key: Key, where: str) -> None:
    """Raise ``SteeringError``, with a field below ``where``, unless the values of a key are valid."""
    read_name(key.name, f"{where}.name")
    if len(key.sha256) != 64 or not _HEX.issuperset(key.sha256):
        raise SteeringError(f"{where}.sha256", "must be 64 lower-case hexadecimal digits")
    if len(key.cache_salt) < _SECRET_BYTES:
        raise SteeringError(f"{where}.cache_salt", f"must be a secret of at least {_SECRET_BYTES} random characters")
    for name, value in key.limits.items():
        limit = KEY_LIMITS.get(name)
        if limit is None:
            raise SteeringError(f"{where}.limits", f"unknown limit {name[:40]!r}; use one of {', '.join(KEY_LIMITS)}")
        if not limit.low <= value <= limit.high:
            raise SteeringError(f"{where}.limits.{name}", f"must be {limit.low} to {limit.high}, not {value}")

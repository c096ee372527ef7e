# SPDX-License-Identifier: Apache-2.0
"""Cache of compiled request fields.

Clients send the same probes and edits again and again, and parsing them takes longer than all other work for a
request. Fields of a body are JSON, so their MessagePack form identifies them: it keeps the types of numbers and the
order of keys.
Modules are resolved later, so entries do not depend on them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
from cachetools import LRUCache

from vllm_steer.params import compile_fields

MAX_FIELD_BYTES = 64 << 10
"""Encoded size up to which fields are cached: a few vectors, whose base64 takes most of the time to parse."""
MAX_BYTES = 8 << 20
"""Size of the cache."""
_Entry: TypeAlias = dict[str, bytes]

_cache: LRUCache[bytes, tuple[int, _Entry]] = LRUCache(MAX_BYTES, getsizeof=lambda entry: entry[0])
_lock = threading.Lock()


def compile_json_fields(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``compile_fields(fields)`` for fields that were decoded from JSON.

    Raises:
        SteeringError: A field is invalid. Errors are not cached.
    """
    try:
        key = msgspec.msgpack.encode(dict(fields))
    except (OverflowError, RecursionError, UnicodeEncodeError):  # huge integers, deep nesting, lone surrogates
        return compile_fields(fields)
    if len(key) > MAX_FIELD_BYTES:
        return compile_fields(fields)
    with _lock:
        found = _cache.get(key)
    if found is None:
        compiled = compile_fields(fields)
        found = len(key) + sum(map(len, compiled.values())), compiled
        if found[0] <= MAX_BYTES:
            with _lock:
                _cache[key] = found
    return dict(found[1])

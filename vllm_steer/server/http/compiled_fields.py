# SPDX-License-Identifier: Apache-2.0
"""Cache of compiled request fields.

Clients send the same probes and edits again and again, and parsing them takes longer than all other work for a
request. Fields of a body are JSON, so their MessagePack form identifies them: it keeps the types of numbers and the
order of keys. Fields that differ from earlier ones in packed vectors only are compiled to the same program with other
vectors. Modules are resolved later, so entries do not depend on them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from cachetools import LRUCache

from vllm_steer.errors import SteeringError
from vllm_steer.params import PROGRAM_KEY, compile_fields
from vllm_steer.program import Program
from vllm_steer.request.edit_fields import SHORT_FIELDS
from vllm_steer.request.vector import bytes_of, content_digest, pack_array, parse_vector
from vllm_steer.server.http.packed_bodies import map_vectors

MAX_FIELD_BYTES = 64 << 10
"""Encoded size up to which fields are cached: a few vectors, whose base64 takes most of the time to parse."""
MAX_BYTES = 8 << 20
"""Size of the cache."""
_Entry: TypeAlias = dict[str, bytes]


class _Outline(NamedTuple):
    """Compiled fields with random numbers as vectors; other fields replace the vectors."""

    compiled: _Entry
    program: Program
    places: tuple[int, ...]
    """Index among the program's vectors of each vector of the fields."""


_cache: LRUCache[bytes, tuple[int, _Entry]] = LRUCache(MAX_BYTES, getsizeof=itemgetter(0))
_outlines: LRUCache[bytes, tuple[int, _Outline]] = LRUCache(MAX_BYTES, getsizeof=itemgetter(0))
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
        compiled = _compile_vectors(fields)
        found = _size_of(key, compiled), compiled
        _put(_cache, key, found)
    return dict(found[1])


def _compile_vectors(fields: Mapping[str, Any]) -> _Entry:
    """Return ``compile_fields(fields)``, from an outline if earlier fields differed in packed vectors only."""
    packed: list[Any] = []
    without = {name: map_vectors(fields[name], partial(_take, packed)) for name in SHORT_FIELDS if name in fields}
    if not packed:
        return compile_fields(fields)
    key = msgspec.msgpack.encode((len(packed), {**fields, **without}))
    with _lock:
        found = _outlines.get(key)
    if found is not None and (compiled := _fill(found[1], packed)) is not None:
        return compiled
    compiled = compile_fields(fields)
    if found is None and (outline := _outline_of(fields, packed)) is not None:
        _put(_outlines, key, (_size_of(key, outline.compiled), outline))
    return compiled


def _take(packed: list[Any], vector: Any) -> Any:
    """Move the data of a packed vector to ``packed``."""
    if not _is_packed(vector):
        return vector
    packed.append(vector)
    return {**vector, "data": None}


def _replace(given: Iterator[Any], vector: Any) -> Any:
    return next(given) if _is_packed(vector) else vector


def _is_packed(vector: Any) -> bool:
    return isinstance(vector, dict) and isinstance(vector.get("data"), str)


def _outline_of(fields: Mapping[str, Any], packed: list[Any]) -> _Outline | None:
    """Return the outline of valid fields, or None if they have no program, or not all of the vectors in it.

    A program stores equal vectors once, even if they come from different fields. Random vectors replace the packed
    ones here, so that no probe and no other edit shares a vector with them.
    """
    random = np.random.default_rng()
    stand_ins = [pack_array(random.standard_normal(parse_vector(vector).size, dtype="f4")) for vector in packed]
    given = iter(stand_ins)
    changed = {name: map_vectors(fields[name], partial(_replace, given)) for name in SHORT_FIELDS if name in fields}
    compiled = compile_fields({**fields, **changed})
    if PROGRAM_KEY not in compiled:
        return None
    program = Program.from_bytes(compiled[PROGRAM_KEY])
    digests = [content_digest(bytes_of(parse_vector(vector))) for vector in stand_ins]
    if not program.by_digest.keys() >= set(digests):  # an edit of strength 0 is left out
        return None
    return _Outline(compiled, program, tuple(program.by_digest[digest] for digest in digests))


def _fill(outline: _Outline, packed: list[Any]) -> _Entry | None:
    """Return what the fields of an outline compile to with other vectors; None if the compiler must look at them."""
    try:
        vectors = [bytes_of(parse_vector(vector)) for vector in packed]
    except SteeringError:  # without the path
        return None
    program = outline.program.with_vectors(dict(zip(outline.places, vectors, strict=True)))
    return None if program is None else {**outline.compiled, PROGRAM_KEY: program.encode_cached()}


def _size_of(key: bytes, compiled: _Entry) -> int:
    return len(key) + sum(map(len, compiled.values()))


def _put(cache: LRUCache[bytes, Any], key: bytes, entry: tuple[int, Any]) -> None:
    if entry[0] <= MAX_BYTES:
        with _lock:
            cache[key] = entry

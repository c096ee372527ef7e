# SPDX-License-Identifier: Apache-2.0
"""What the requests in flight of one API server process take up, by key and together.

An HTTP request holds what it takes from the moment its sampling parameters are made until it has been answered, has
failed, or its client has gone. All of this is for the event loop.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from fastapi import FastAPI

from vllm_steer.errors import SteeringError
from vllm_steer.limits import (
    KEY_CAPTURE_MIB,
    KEY_POOL_MIB,
    KEY_PROGRAMS,
    KEY_REQUESTS,
    KEY_STORE_MIB,
    MAX_NORM,
    MAX_PROGRAMS,
    REQUEST_EDITS,
    REQUEST_LAYERS,
    REQUEST_VECTORS,
    SERVER_LIMITS,
    ServerLimit,
)
from vllm_steer.program import Program
from vllm_steer.program.magnitude import check_magnitude
from vllm_steer.program.program import CompiledEdit, CompiledRead
from vllm_steer.server.auth.keys import Key
from vllm_steer.server.auth.rights import KeyLimitError, ServerFullError, TooLargeError
from vllm_steer.server.quota.limits import processes_of, share_of, value_of
from vllm_steer.spec import CaptureSpec
from vllm_steer.spec.projection import Projection

STEERING = "steering"
_STATE = "vllm_steer_books"


@dataclass(frozen=True)
class RequestLoad:
    """What one request adds to what everybody gets."""

    digest: bytes
    """Of the whole program."""
    vectors: Mapping[bytes, int]
    """Bytes by digest."""


@dataclass
class KeyUsage:
    """What a key has going."""

    requests: int = 0
    programs: Counter[bytes] = field(default_factory=Counter)
    vectors: Counter[bytes] = field(default_factory=Counter)
    vector_bytes: int = 0
    row_bytes: int = 0


class QuotaTracker:
    """The counts of one process, which has its part of each limit where there are several."""

    def __init__(self, args: object) -> None:
        """From the parsed flags of a server."""
        self._values = {limit: value_of(args, limit) for limit in SERVER_LIMITS}
        self._processes = processes_of(args)
        self._accounts: dict[str, KeyUsage] = {}
        self._programs: Counter[bytes] = Counter()

    def enter(self, key: Key | None) -> Reservation:
        """A request begins; raises KeyLimitError. What it holds is to be released whatever becomes of it."""
        if key is None:
            return Reservation(self, None, None)
        account = self._accounts.setdefault(key.sha256, KeyUsage())
        if account.requests >= self.limit(KEY_REQUESTS, key):
            raise KeyLimitError("authorization", self._reached(KEY_REQUESTS, key))
        account.requests += 1
        return Reservation(self, key, account)

    def limit(self, limit: ServerLimit, key: Key | None) -> int:
        """The part of ``limit`` that is this process's."""
        whole = self.whole(limit, key)
        return whole if limit.scope == "request" else share_of(whole, self._processes)

    def whole(self, limit: ServerLimit, key: Key | None) -> int:
        """``limit`` as it is set, by the key or else by the server's flags."""
        value = self._values[limit]
        return value if key is None or limit.key_name is None else key.limits.get(limit.key_name, value)

    def load_of(
        self, program: Program, everybody: Program | None, num_layers: int, specs: Sequence[CaptureSpec] = ()
    ) -> RequestLoad:
        """What ``program`` takes beside that which ``everybody`` gets, whose edits come first in it; of ``specs`` the
        directions that are not in it, since their products are formed where rows arrive.

        Raises:
            TooLargeError: it is more than one request may have.
            SteeringError: an edit is over the ceiling.
        """
        steps = program.edits if everybody is None else program.edits[len(everybody.edits) :]
        shared = {} if everybody is None else everybody.by_digest
        places = {step.vector for step in steps}.union(*program.projections)
        used = {program.digests[place]: len(program.vectors[place]) for place in places}
        for spec in specs:
            if isinstance(spec.reduce, Projection) and not spec.reduce.in_engine:
                used.update((digest, 4 * spec.reduce.directions.shape[1]) for digest in spec.reduce.digests)
        vectors = {digest: size for digest, size in used.items() if digest not in shared}
        parts: list[CompiledEdit | CompiledRead] = [*steps, *program.reads]
        layers = {layer for part in parts for layer in part.layers or range(num_layers)}
        self.check_count(REQUEST_EDITS, len(steps))
        self.check_count(REQUEST_VECTORS, len(vectors))
        self.check_count(REQUEST_LAYERS, len(layers))
        check_magnitude(program, self.limit(MAX_NORM, None), len(program.edits) - len(steps))
        content = msgspec.msgpack.encode((program.edits, program.reads, program.digests))
        return RequestLoad(hashlib.blake2b(content, digest_size=16).digest(), vectors)

    def check_count(self, limit: ServerLimit, count: int) -> None:
        """Raise TooLargeError where one request has more of something than ``limit`` allows."""
        most = self.limit(limit, None)
        if count > most:
            what = limit.name.partition("_")[2]
            raise TooLargeError(STEERING, f"has {count} {what}; {most} is the most ({limit.flag})")

    @property
    def in_use(self) -> dict[str, int]:
        """What is held now, all keys together; nothing is in use when no request is."""
        accounts = self._accounts.values()
        return {
            "requests": sum(account.requests for account in accounts),
            "programs": len(self._programs),
            "vector_bytes": sum(account.vector_bytes for account in accounts),
            "row_bytes": sum(account.row_bytes for account in accounts),
            "keys": len(self._accounts),
        }

    def take_program(self, key: Key | None, account: KeyUsage | None, load: RequestLoad) -> None:
        """Book ``load``; raises, and books nothing, where it does not fit."""
        if load.digest not in self._programs and len(self._programs) >= self.limit(MAX_PROGRAMS, None):
            most = self.limit(MAX_PROGRAMS, None)
            raise ServerFullError(STEERING, f"this server has {most} distinct programs going ({MAX_PROGRAMS.flag})")
        if key is not None and account is not None:
            if load.digest not in account.programs and len(account.programs) >= self.limit(KEY_PROGRAMS, key):
                raise KeyLimitError(STEERING, self._reached(KEY_PROGRAMS, key))
            new = sum(size for digest, size in load.vectors.items() if digest not in account.vectors)
            self._check_bytes(KEY_POOL_MIB, key, sum(load.vectors.values()), account.vector_bytes + new)
            account.programs[load.digest] += 1
            account.vectors.update(load.vectors.keys())
            account.vector_bytes += new
        self._programs[load.digest] += 1

    def take_rows(self, key: Key, account: KeyUsage, num_bytes: int, own: int) -> None:
        """Book captured rows, of a request that holds ``own`` bytes of them by now; raises as `take_program` does."""
        self._check_bytes(KEY_CAPTURE_MIB, key, own + num_bytes, account.row_bytes + num_bytes)
        account.row_bytes += num_bytes

    def give_back(self, key: Key | None, account: KeyUsage | None, load: RequestLoad | None, row_bytes: int) -> None:
        """A request has ended."""
        if load is not None:
            _without(self._programs, load.digest)
        if key is None or account is None:
            return
        account.requests -= 1
        account.row_bytes -= row_bytes
        if load is not None:
            _without(account.programs, load.digest)
            for digest, size in load.vectors.items():
                account.vector_bytes -= size if _without(account.vectors, digest) else 0
        if not account.requests:
            del self._accounts[key.sha256]

    def _check_bytes(self, limit: ServerLimit, key: Key, alone: int, together: int) -> None:
        most = self.limit(limit, key) << 20
        field = "capture" if limit.prefix == "capture" else STEERING
        if alone > most:
            raise TooLargeError(field, f"may come to {alone} bytes, and {self._reached(limit, key)} in all")
        if together > most:
            raise KeyLimitError(field, self._reached(limit, key))

    def _reached(self, limit: ServerLimit, key: Key) -> str:
        each = f", of which each of {self._processes} server processes has its part" if self._processes > 1 else ""
        return f"the limit of the key {key.name} is {self.whole(limit, key)}: {limit.help} ({limit.flag}{each})"


class Reservation:
    """What one HTTP request holds."""

    def __init__(self, books: QuotaTracker, key: Key | None, account: KeyUsage | None) -> None:
        self.books = books
        self._key, self._account = key, account
        self._load: RequestLoad | None = None
        self._row_bytes = 0
        self._released = False

    def take_program(
        self, program: Program, everybody: Program | None, num_layers: int, specs: Sequence[CaptureSpec] = ()
    ) -> None:
        """Take a place for the request's program; see `QuotaTracker.load_of`. Raises an AccessError."""
        if self._load is not None or self._released:
            raise SteeringError(STEERING, "stands in a request that has its program already")
        load = self.books.load_of(program, everybody, num_layers, specs)
        self.books.take_program(self._key, self._account, load)
        self._load = load

    def take_rows(self, num_bytes: int) -> None:
        """Take room for captured rows, in bytes as the model has them; once for each prompt. Raises an AccessError."""
        if self._key is not None and self._account is not None and not self._released:
            self.books.take_rows(self._key, self._account, num_bytes, self._row_bytes)
            self._row_bytes += num_bytes

    @property
    def store_bytes(self) -> int | None:
        """How many bytes may be kept for the key to be fetched, in all processes; None for no limit of its own."""
        return None if self._key is None else self.books.whole(KEY_STORE_MIB, self._key) << 20

    def release(self) -> None:
        """Give everything back, once."""
        if not self._released:
            self._released = True
            self.books.give_back(self._key, self._account, self._load, self._row_bytes)


def _without(counter: Counter[bytes], item: bytes) -> bool:
    """Count one down; returns whether it was the last."""
    counter[item] -= 1
    last = not counter[item]
    if last:
        del counter[item]
    return last


def quota_tracker_of(app: FastAPI) -> QuotaTracker:
    """The books of a server; they are made when they are first asked for."""
    books: QuotaTracker | None = getattr(app.state, _STATE, None)
    if books is None:
        books = QuotaTracker(getattr(app.state, "args", None))
        setattr(app.state, _STATE, books)
    return books

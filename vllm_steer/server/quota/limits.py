# SPDX-License-Identifier: Apache-2.0
"""The limits of a server, in one table: flags, refusals, the key file and the reference page are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Literal

from vllm_steer.config import Limit

Scope = Literal["request", "key", "server"]
_KEY = "key_"


@dataclass(frozen=True)
class ServerLimit(Limit):
    """A limit that the server keeps before the engine hears of a request."""

    of: Literal["steering", "capture"] = "steering"
    """What its flag begins with."""
    scope: Scope = "request"
    """What is counted: one request, all that one key has going, or all there is."""
    status: HTTPStatus | None = None
    """How a request beyond it is answered; None where it is served, and ``help`` says how."""

    @property
    def dest(self) -> str:
        """Its name among the parsed flags."""
        return f"{self.of}_{self.name}"

    @property
    def flag(self) -> str:
        """How it is set."""
        return f"--{self.dest.replace('_', '-')}"

    @property
    def of_key(self) -> str | None:
        """Its name in a key's own limits; None where keys have none of their own."""
        return f"{self.of}_{self.name.removeprefix(_KEY)}" if self.scope == "key" else None


_413, _429 = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.TOO_MANY_REQUESTS
_503, _507 = HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INSUFFICIENT_STORAGE

MAX_BODY = ServerLimit(
    "max_body_mib", 64, 1, 1 << 16, "largest HTTP body with steering or capture fields, in MiB", status=_413
)
EDITS = ServerLimit(
    "request_edits", 1024, 1, 1 << 20, "edits of one request, those of the modules it names included", status=_413
)
VECTORS = ServerLimit(
    "request_vectors",
    1024,
    1,
    1 << 20,
    "distinct vectors and directions of one request, those of modules included",
    status=_413,
)
LAYERS = ServerLimit("request_layers", 4096, 1, 1 << 16, "distinct layers that one request edits or reads", status=_413)
NORM = ServerLimit(
    "max_norm",
    0,
    0,
    1 << 24,
    "ceiling of what an `add` edit of a request, a module or global steering adds, strength x norm of its vector, and "
    "of a `clamp`'s bounds, times a strength above 1; 0 for none. `add_normed` and `ablate` go by the stream's own "
    "norm",
    status=HTTPStatus.BAD_REQUEST,
)
REQUESTS = ServerLimit("key_requests", 256, 1, 1 << 20, "HTTP requests that a key has going", scope="key", status=_429)
PROGRAMS = ServerLimit(
    "key_programs",
    128,
    1,
    1 << 20,
    "distinct programs, edits and reads, that a key has going",
    scope="key",
    status=_429,
)
POOL = ServerLimit(
    "key_pool_mib",
    256,
    1,
    1 << 20,
    "distinct vectors and directions that a key has going, float32, in MiB",
    scope="key",
    status=_429,
)
ROWS = ServerLimit(
    "key_mib",
    1024,
    1,
    1 << 24,
    "captured rows that a key's requests may come to until they end, in MiB",
    of="capture",
    scope="key",
    status=_429,
)
KEY_STORE = ServerLimit(
    "key_store_mib",
    512,
    0,
    1 << 20,
    "captured rows of a key that are kept to be fetched, in MiB",
    of="capture",
    scope="key",
    status=_429,
)
ALL_PROGRAMS = ServerLimit(
    "max_programs", 4096, 1, 1 << 24, "distinct programs that all requests have going", scope="server", status=_503
)
INLINE = ServerLimit(
    "inline_kib",
    1024,
    0,
    1 << 20,
    "most captured rows of one choice that are part of the answer, in KiB; more go to /v1/captures",
    of="capture",
)
RESPONSE = ServerLimit(
    "response_mib",
    64,
    0,
    1 << 20,
    "most captured rows of all choices that are part of one answer, in MiB; more go to /v1/captures",
    of="capture",
)
STORE = ServerLimit(
    "store_mib",
    1024,
    0,
    1 << 20,
    "captured rows kept to be fetched from /v1/captures, all together, in MiB; beyond it, an answer says that its rows "
    "could not be kept",
    of="capture",
    scope="server",
)
EXPIRY = ServerLimit(
    "expiry_s",
    300,
    1,
    86400,
    "how long captured rows are kept to be fetched, in seconds",
    of="capture",
    scope="server",
)
REGISTRY_MODULES = ServerLimit(
    "registry_modules", 4096, 1, 1 << 20, "names of registered modules", scope="server", status=_507
)
REGISTRY_MIB = ServerLimit(
    "registry_mib",
    1024,
    1,
    1 << 20,
    "vectors of all registered modules and their versions, which every server process has in memory, in MiB",
    scope="server",
    status=_507,
)

SERVER_LIMITS: tuple[ServerLimit, ...] = (
    *(MAX_BODY, EDITS, VECTORS, LAYERS, NORM),
    *(REQUESTS, PROGRAMS, POOL, ROWS, KEY_STORE),
    *(ALL_PROGRAMS, INLINE, RESPONSE, STORE, EXPIRY, REGISTRY_MODULES, REGISTRY_MIB),
)
KEY_LIMITS: Mapping[str, ServerLimit] = MappingProxyType(
    {limit.of_key: limit for limit in SERVER_LIMITS if limit.of_key is not None}
)
"""By the names that they have in a key's own limits."""


def value_of(args: object, limit: ServerLimit) -> int:
    """What the parsed flags of a server set ``limit`` to."""
    value = getattr(args, limit.dest, None)
    return int(limit.default if value is None else value)


def processes_of(args: object) -> int:
    """How many API server processes share what is counted; each keeps its part of a limit, rounded up."""
    return max(getattr(args, "api_server_count", None) or 1, 1)


def share_of(value: int, processes: int) -> int:
    """One process's part, rounded up."""
    return -(-value // processes)

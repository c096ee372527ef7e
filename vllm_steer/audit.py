# SPDX-License-Identifier: Apache-2.0
"""The record of who changed what: one JSON object a line under the logger ``vllm.steering.audit``.

A change of the registry, of global steering or of the file of API keys is recorded when it is kept, and never before:
what was refused is not there. Vectors and keys never are; digests say which vectors they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_steer.server.auth.caller import caller

LOGGER = "vllm.steering.audit"
FIELDS: Mapping[str, str] = {
    "time": "when it was kept: UTC, ISO 8601",
    "event": "`register`, `delete`, `set`, `clear`; `keys`: an API server has read a changed file of keys",
    "who": "the name of the API key; `anonymous` where the server has none; `start` for modules of "
    "`--steering-modules`; `offline` for a change that came over no HTTP",
    "address": "the client's address over HTTP, as the server sees it; else null",
    "epoch_before": "state of the registry before; null for `keys`",
    "epoch_after": "state after; the same number where the change left everything as it was",
    "name": "the module's name, or the file of keys; null for global steering",
    "digests": "what was registered or deleted; for global steering, the digest of the whole, none when it is cleared",
}
"""All fields of every record, in order, and what they say."""

ANONYMOUS, OFFLINE, START = "anonymous", "offline", "start"

_logger = init_logger(LOGGER)
_origin: ContextVar[tuple[str, str | None]] = ContextVar("vllm_steer_origin", default=(OFFLINE, None))


@contextmanager
def coming_from(who: str, address: str | None = None) -> Iterator[None]:
    """Whose doing the changes within are, unless a key says otherwise, and where it came from."""
    token = _origin.set((who, address))
    try:
        yield
    finally:
        _origin.reset(token)


def record(event: str, *, before: int | None, after: int | None, name: str | None, digests: list[str]) -> None:
    """Write one line."""
    _write(event, caller.get(), *_origin.get(), before, after, name, digests)


def record_keys(path: Path) -> None:
    """The file of keys was changed and read: by whom it was changed, no request knows."""
    _write("keys", None, OFFLINE, None, None, None, str(path), [])


def _write(
    event: str,
    key: str | None,
    who: str,
    address: str | None,
    before: int | None,
    after: int | None,
    name: str | None,
    digests: list[str],
) -> None:
    values: tuple[Any, ...] = (
        datetime.now(UTC).isoformat(timespec="milliseconds"),
        event,
        key or who,
        address,
        before,
        after,
        name,
        digests,
    )
    # Escaped to ASCII: nothing that a client sends can begin a line of its own.
    _logger.info("%s", json.dumps(dict(zip(FIELDS, values, strict=True)), separators=(",", ":")))

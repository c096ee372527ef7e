# SPDX-License-Identifier: Apache-2.0
"""Audit log of changes: one JSON object per line under the logger ``vllm.steering.audit``.

Changes of modules, of global steering and of the API key file are logged after they are stored, changes of live
strengths after the engine has confirmed them, patching studies over HTTP when they start. Rejected changes are not
logged. Records contain digests of vectors, but neither vectors nor keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_steer.compat.internals import init_logger

LOGGER = "vllm.steering.audit"
FIELDS: Mapping[str, str] = {
    "time": "time of the change: UTC, ISO 8601",
    "event": "`register`, `delete`, `set`, `clear`; `keys` if an API server has reloaded the key file; `live` if live "
    "strengths of a running request have changed over HTTP or by a controller; `study` if a patching study has started "
    "over HTTP",
    "who": "name of the API key; `anonymous` without a key file; `start` for `--steering-modules`; `offline` "
    "for a change without HTTP; `controller:NAME` for the first change by a controller in a sample",
    "address": "the client's address as the server sees it; null without HTTP",
    "epoch_before": "epoch of the registry before the change; null for `keys`, `live` and `study`",
    "epoch_after": "epoch after the change; the same number if the change had no effect",
    "name": "name of the module, path of the key file, or id of the running request; null for global steering",
    "digests": "digests of the modules that were registered or deleted; for global steering its digest, or "
    "none if it was cleared; for `study` the digest of the study",
    "strengths": "for `live` the new strengths by name; otherwise null",
}
"""Fields of every record, in order, with their descriptions."""

ANONYMOUS, OFFLINE, START = "anonymous", "offline", "start"

_logger = init_logger(LOGGER)
_origin: ContextVar[tuple[str, str | None]] = ContextVar("vllm_steer_audit_origin", default=(OFFLINE, None))


@contextmanager
def attribute_to(who: str, address: str | None = None) -> Iterator[None]:
    """Attribute the changes made in this context to ``who`` at a network address."""
    token = _origin.set((who, address))
    try:
        yield
    finally:
        _origin.reset(token)


def record(event: str, *, before: int | None, after: int | None, name: str | None, digests: list[str]) -> None:
    """Log a change of the registry from epoch ``before`` to epoch ``after``."""
    _write(event, *_origin.get(), before, after, name, digests, None)


def record_strengths(request_id: str, strengths: Mapping[str, float]) -> None:
    """Log that live strengths of a running request have changed."""
    _write("live", *_origin.get(), None, None, request_id[:80], [], dict(strengths))


def record_study(digest: str) -> None:
    """Log that a patching study has started over HTTP."""
    _write("study", *_origin.get(), None, None, None, [digest], None)


def record_keys(path: Path) -> None:
    """Log that a changed key file was read. Who changed it is unknown."""
    _write("keys", OFFLINE, None, None, None, str(path), [], None)


def _write(event: str, *values: Any) -> None:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    entry = dict(zip(FIELDS, (time, event, *values), strict=True))
    # json.dumps escapes to ASCII: client-supplied text cannot start a new line.
    _logger.info("%s", json.dumps(entry, separators=(",", ":")))

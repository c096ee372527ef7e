# SPDX-License-Identifier: Apache-2.0
"""``GenerateConfig.extra_body`` as the server's request fields, and as its log shows them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_steer.adapters import REQUEST_FIELDS, problem_of
from vllm_steer.client import to_json
from vllm_steer.errors import SteeringError
from vllm_steer.peers.vllm_lens.keys import KEYS, LORA_FIELD, PARENTS, read_adapter, read_keys

SHARED_KEY = "vllm_steer_shared"
"""Key of ``extra_args`` that refers to fields in this process, so that no vector is written to a log."""
TOKENS_FIELD = "return_token_ids"
_RESULTS = ("capture", "readouts")
_MAX_LOGGED = 32
"""Numbers of a list that a log shows; longer lists of numbers are replaced by their count and digest."""

_shared: dict[str, Mapping[str, Any]] = {}
_users: Counter[str] = Counter()


@contextmanager
def shared(fields: Mapping[str, Any]) -> Iterator[str]:
    """Keep fields in this process, and yield the value of :data:`SHARED_KEY` that refers to them.

    The value is a digest of the fields, so logs tell different fields apart.
    """
    key = _digest(to_json(_separate(fields)[0], "extra_args"))
    _shared[key] = fields
    _users[key] += 1
    try:
        yield key
    finally:
        _users[key] -= 1
        if not _users[key]:
            del _shared[key], _users[key]


@dataclass(frozen=True)
class Prepared:
    """Fields of one request."""

    body: Mapping[str, Any]
    """Fields of the body."""
    logged: Mapping[str, Any]
    """The same fields without vectors."""
    model: str | None
    """Adapter that answers the request; None for the model."""
    stacked: bool
    """Whether captured rows are returned as one tensor ``residual_stream``."""

    @property
    def has_results(self) -> bool:
        """Whether the response has rows or readouts."""
        return any(name in self.body for name in _RESULTS)

    @property
    def needs_whole(self) -> bool:
        """Whether the response has fields that a stream does not carry."""
        return self.has_results or bool(self.body.get(TOKENS_FIELD))


def prepare(extra_body: Mapping[str, Any] | None) -> Prepared:
    """Check and translate ``extra_body``.

    Raises:
        SteeringError: A key is invalid, not supported, or given twice.
    """
    body, stacked = _separate(extra_body or {})
    lora = body.pop(LORA_FIELD, None)
    model = None if lora is None else read_adapter(lora)
    body = to_json(body, "extra_body")
    if any(name in body for name in _RESULTS):
        body[TOKENS_FIELD] = True
    return Prepared(body, summarize(body), model, stacked)


def _separate(extra_body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the fields of the body, and whether they come from ``output_residual_stream``."""
    body = dict(extra_body)
    extra: dict[str, Any] = {}
    for parent in PARENTS:
        _merge(extra, body.pop(parent, None), parent)
    if (key := extra.pop(SHARED_KEY, None)) is not None:
        if key not in _shared:
            raise SteeringError(f"extra_args.{SHARED_KEY}", "refers to fields of a process that has ended")
        inner, stacked = _separate(_shared[key])
        rest, also = _separate({**body, "extra_args": extra})
        return join(rest, inner), stacked or also
    keys = read_keys({key: extra.pop(key) for key in KEYS if key in extra}, "extra_args")
    for name in [name for name in extra if name in REQUEST_FIELDS or name == LORA_FIELD]:
        if name in body:
            raise SteeringError(f"extra_args.{name}", "is also in extra_body; give it once")
        body[name] = extra.pop(name)
    for name in (*extra, *body):
        if name not in REQUEST_FIELDS and name != LORA_FIELD and (problem := problem_of(name)) is not None:
            raise SteeringError(f"extra_body.{name}", problem)
    body = keys.add_to(body, "extra_args")
    if extra:
        body["vllm_xargs"] = extra
    return body, keys.capture is not None


def join(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of both; edits of ``second`` apply after those of ``first``.

    Raises:
        SteeringError: Both have a field that cannot be joined.
    """
    joined = dict(first)
    for name, value in second.items():
        old = joined.get(name)
        if old is None:
            joined[name] = value
        elif isinstance(old, (list, tuple)) and isinstance(value, (list, tuple)):
            joined[name] = [*old, *value]
        elif isinstance(old, Mapping) and isinstance(value, Mapping) and not old.keys() & value.keys():
            joined[name] = {**old, **value}
        elif old != value:
            raise SteeringError(f"extra_body.{name}", "is set by the task and by a solver; set it once")
    return joined


def summarize(value: Any) -> Any:
    """Return JSON without vectors: packed arrays and long lists of numbers become their size and digest."""
    if isinstance(value, Mapping):
        if isinstance(value.get("data"), str):
            kept = {key: item for key, item in value.items() if key != "data"}
            return {**kept, "digest": _digest(value["data"])}
        return {key: summarize(item) for key, item in value.items()}
    if isinstance(value, list):
        if len(value) > _MAX_LOGGED and all(isinstance(item, (int, float)) for item in value):
            return {"numbers": len(value), "digest": _digest(value)}
        return [summarize(item) for item in value]
    return value


def _merge(extra: dict[str, Any], values: Any, parent: str) -> None:
    if values is None:
        return
    if not isinstance(values, Mapping):
        raise SteeringError(f"extra_body.{parent}", "must be an object with request keys")
    for name, value in values.items():
        if name in extra:
            raise SteeringError(f"{parent}.{name}", f"is also in {PARENTS[0]}; give it once")
        extra[name] = value


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

# SPDX-License-Identifier: Apache-2.0
"""Requests of the clients as values, the parts that several of them share, their retries, and the events of streams."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from vllm_steer.client.encoding import to_json
from vllm_steer.client.responses import Completion, parse_completion, parse_error
from vllm_steer.errors import SteeringError
from vllm_steer.registry.schema import Deleted, GlobalSteering, LiveStrengths, ModuleInfo, ModuleList

if TYPE_CHECKING:
    from vllm_steer.patching import PatchingResult


T = TypeVar("T")
S = TypeVar("S", Deleted, GlobalSteering, LiveStrengths, ModuleInfo, ModuleList)
ROOT = "/v1/steering"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Endpoint(Generic[T]):
    """One request, and how to parse its response."""

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    json: Any = None
    content: bytes | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = True
    """Whether the request can be repeated if its response is lost."""
    names_model: bool = False
    """Whether the client adds the model to the body."""

    def request(self, http: httpx.Client | httpx.AsyncClient, model: str | None) -> httpx.Request:
        """Build the HTTP request; ``model`` is used if the request names one."""
        headers = {} if self.content is None else {"content-type": "application/octet-stream"}
        body = {"model": model, **self.json} if self.names_model else self.json
        return http.build_request(
            self.method, self.path, json=body, content=self.content, params=self.params, headers=headers
        )


def answer_of(schema: type[S], method: str, path: str, **options: Any) -> Endpoint[S]:
    """Return a request of a route of ours, whose response has this schema."""
    return Endpoint(method, ROOT + path, lambda response: schema.model_validate_json(response.content), **options)


def generation(path: str, body: Mapping[str, Any], *, stream: bool = False) -> Endpoint[Completion]:
    """Return a request that generates; raise SteeringError for a text as messages, or a stream as a whole answer."""
    if body.get("stream") and not stream:
        raise SteeringError("stream", "is not supported here, where the answer comes as a whole; use stream_chat")
    if any(isinstance(each, str) for each in body.get("messages", ())):
        raise SteeringError("messages", 'must be a list such as [{"role": "user", "content": "Hello"}], not a text')
    encoded = to_json({**body, **({"stream": True} if stream else {})}, "body")
    return Endpoint("POST", path, _parse_completion, json=encoded, idempotent=False, names_model=True)


def streamed_study(study: Mapping[str, Any]) -> Endpoint[None]:
    """Return the request of a patching study that is answered with events."""
    body = {**without_none(study, "study"), "stream": True}
    return Endpoint("POST", f"{ROOT}/patch", lambda _: None, json=body, idempotent=False)


def study_result(event: Mapping[str, Any]) -> PatchingResult:
    """Return the result in the last event of a study that asked for its file."""
    from vllm_steer.patching.file import decode

    return decode(base64.b64decode(event["file"]), "the server's answer")


def served_model() -> Endpoint[str]:
    """Return the request for the server's first model."""
    return Endpoint("GET", "/v1/models", _parse_first_model)


def check_url(url: str) -> str:
    """Return the URL of a server; raise SteeringError unless it begins with http:// or https:// and is the root's."""
    scheme, found, _ = url.partition("://")
    if not found:
        raise SteeringError("url", f"{url!r} has no scheme; write http://{url}")
    if scheme.lower() not in ("http", "https"):
        raise SteeringError("url", f"{url!r} must begin with http:// or https://")
    if (root := url.rstrip("/")).endswith("/v1"):
        raise SteeringError("url", f"{url!r} ends with /v1, which is added to it; write {root.removesuffix('/v1')}")
    return url


def auth_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers that authenticate a request.

    Raises:
        SteeringError: The key contains characters that no header can carry. The error does not show the key.
    """
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or api_key != api_key.strip():
        raise SteeringError("api_key", "contains surrounding spaces, line ends or non-ASCII characters")
    return {"authorization": f"Bearer {api_key}"}


def without_none(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the JSON form of fields that are given."""
    encoded: dict[str, Any] = to_json({key: value for key, value in fields.items() if value is not None}, name)
    return encoded


def module_path(reference: str) -> str:
    """Return the path of a module below the root of our routes."""
    return f"/modules/{quote(reference, safe='')}"


def data_param(data: bool) -> dict[str, str]:
    """Return the parameters of a request whose answer includes vectors if ``data`` is set."""
    return {"data": "true"} if data else {}


def _parse_completion(response: httpx.Response) -> Completion:
    return parse_completion(response.json())


def _parse_first_model(response: httpx.Response) -> str:
    try:
        return str(response.json()["data"][0]["id"])
    except (LookupError, TypeError):
        raise ValueError("the server's list of models has an unexpected form") from None


_LINE_END = re.compile(rb"[\r\n]+")
_DATA = b"data: "


def iter_events(stream: Iterator[bytes]) -> Iterator[Mapping[str, Any]]:
    """Parse the JSON objects of a stream, each on a single ``data:`` line."""
    parser = _EventParser()
    for chunk in stream:
        yield from parser.feed(chunk)
    yield from parser.feed(b"\n")


async def aiter_events(stream: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """Parse an asynchronous stream as :func:`iter_events` does."""
    parser = _EventParser()
    async for chunk in stream:
        for event in parser.feed(chunk):
            yield event
    for event in parser.feed(b"\n"):
        yield event


class _EventParser:
    """Incremental parser of chunks with arbitrary boundaries.

    httpx's ``iter_lines`` splits lines as ``str.splitlines`` does, also at characters such as U+2028 that JSON strings
    may contain. Lines of server-sent events end at CR, LF or CRLF only.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # parts of the unfinished line

    def feed(self, chunk: bytes) -> Iterator[Mapping[str, Any]]:
        """Yield the objects on the lines that end in ``chunk``."""
        first, *rest = _LINE_END.split(chunk)
        self._line.append(first)
        for start in rest:
            line = b"".join(self._line)
            self._line = [start]
            if line.startswith(_DATA + b"{"):
                yield json.loads(line[len(_DATA) :].decode("utf-8", "replace"))


_RETRY_STATUSES = (429, 503)  # the server has not processed the request
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
_MAX_RETRY_AFTER = 60.0


def error_of(outcome: httpx.Response | httpx.TransportError, url: httpx.URL) -> Exception:
    """Return the error with which a request to ``url`` fails."""
    if isinstance(outcome, httpx.Response):
        return parse_error(outcome)
    problem = str(outcome) or type(outcome).__name__
    remedy = (
        "start the server, or give the client its url" if isinstance(outcome, _NOT_SENT) else "see the server's log"
    )
    return type(outcome)(f"cannot reach {url}: {problem}; {remedy}", request=outcome.request)


@dataclass(frozen=True)
class Retry:
    """Exponential backoff with jitter.

    The delay doubles from ``first`` up to ``longest`` seconds and is reduced by up to half at random. A longer
    ``Retry-After`` of the server is respected up to 60 seconds.
    """

    attempts: int = 5
    """Most attempts per request."""
    first: float = 0.25
    """First delay in seconds."""
    longest: float = 8.0
    """Longest delay in seconds."""

    def delay(self, attempt: int, outcome: httpx.Response | httpx.TransportError, idempotent: bool) -> float | None:
        """Return the seconds to wait before the next attempt, or None if the outcome is final.

        Args:
            attempt: Number of attempts so far.
            outcome: Error response or connection error of the last attempt.
            idempotent: Whether a request that may have reached the server can be sent again.
        """
        if attempt >= self.attempts:
            return None
        delay: float = min(self.first * 2 ** (attempt - 1), self.longest) * random.uniform(0.5, 1.0)
        if isinstance(outcome, httpx.TransportError):
            return delay if idempotent or isinstance(outcome, _NOT_SENT) else None
        if outcome.status_code not in _RETRY_STATUSES:
            return None
        retry_after = outcome.headers.get("retry-after", "")
        if retry_after.isascii() and retry_after.isdecimal():
            delay = max(delay, min(float(retry_after), _MAX_RETRY_AFTER))
        return delay

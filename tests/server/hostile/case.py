# SPDX-License-Identifier: Apache-2.0
"""Definition, sending and response check of a hostile request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx

MODEL = "tiny"
PROMPT = "Hello there"
JSON = "application/json"
MODULES, SET, CLEAR = "/v1/steering/modules", "/v1/steering/set", "/v1/steering/clear"
_SAMPLING = f'"model": "{MODEL}", "temperature": 0'
_CHAT = '[{"role": "user", "content": "' + PROMPT + '"}]'
# Route that accepts steering fields -> a valid body without them, as the inside of a JSON object.
VALID_BODIES: dict[str, str] = {
    "/v1/completions": f'{_SAMPLING}, "max_tokens": 1, "prompt": "{PROMPT}"',
    "/v1/chat/completions": f'{_SAMPLING}, "max_tokens": 1, "messages": {_CHAT}',
    "/v1/chat/completions/batch": f'{_SAMPLING}, "max_tokens": 1, "messages": [{_CHAT}]',
    "/v1/responses": f'{_SAMPLING}, "max_output_tokens": 1, "input": "{PROMPT}"',
    "/invocations": f'{_SAMPLING}, "max_tokens": 1, "prompt": "{PROMPT}"',
}
STREAMING = frozenset(VALID_BODIES) - {"/v1/chat/completions/batch"}

ErrorForm = Literal["named", "openai", "framework"]
"""Form of the expected error.

* named: OpenAI's form with the name of a field.
* openai: OpenAI's form; errors that vLLM raises need not name a field.
* framework: any short error of the HTTP framework, for unknown paths and methods and for compressed JSON.
"""
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Case:
    """A request that must be refused."""

    name: str
    method: str
    target: str
    """Path and query, sent byte for byte."""
    body: bytes = b""
    content_type: str | None = JSON
    headers: tuple[tuple[str, str], ...] = ()
    chunked: bool = False
    """Whether the body is sent with chunked transfer encoding."""
    error_form: ErrorForm = "named"

    def __str__(self) -> str:
        return f"{self.name}: {self.method} {self.target[:80]}"


def send(client: httpx.Client, case: Case) -> httpx.Response:
    """Send a case on a connection of ``client`` and return the response."""
    headers = dict(case.headers)
    if case.content_type is not None:
        headers["content-type"] = case.content_type
    content: Any = _chunks(case.body) if case.chunked else case.body
    target = {"target": case.target.encode("latin-1")}  # httpx would normalize a URL
    return client.request(case.method, "/", content=content, headers=headers, extensions=target)


def _chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), _CHUNK_BYTES):
        yield body[start : start + _CHUNK_BYTES]


def find_fault(case: Case, response: httpx.Response) -> str | None:
    """Return a description of the response's fault, or None for status 4xx and an error of the expected form."""
    if not 400 <= response.status_code < 500:
        return f"{case}: HTTP {response.status_code}: {response.text[:300]}"
    if case.error_form == "framework":
        return None if len(response.content) < 200 else f"{case}: {response.text[:300]}"
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"{case}: not OpenAI's form: {response.text[:300]}"
    if set(error) != {"message", "type", "param", "code"} or error["code"] != response.status_code:
        return f"{case}: not OpenAI's form: {response.text[:300]}"
    if not isinstance(error["message"], str) or not error["message"].strip():
        return f"{case}: no message: {response.text[:300]}"
    if case.error_form == "named" and not (isinstance(error["param"], str) and error["param"]):
        return f"{case}: names no field: {response.text[:300]}"
    if len(response.content) > 4096:
        return f"{case}: an error of {len(response.content)} bytes"
    return None


def greedy(client: httpx.Client) -> dict[str, Any]:
    """Return a greedy completion of a plain request, without its id and time."""
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 5}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    completion: dict[str, Any] = response.json()
    return {key: value for key, value in completion.items() if key not in ("id", "created")}

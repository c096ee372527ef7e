# SPDX-License-Identifier: Apache-2.0
"""A hostile request, how it is sent, and the check of its response."""

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
# What is right of a body of each route that carries our fields, as the inside of a JSON object.
CARRYING: dict[str, str] = {
    "/v1/completions": f'{_SAMPLING}, "max_tokens": 1, "prompt": "{PROMPT}"',
    "/v1/chat/completions": f'{_SAMPLING}, "max_tokens": 1, "messages": {_CHAT}',
    "/v1/chat/completions/batch": f'{_SAMPLING}, "max_tokens": 1, "messages": [{_CHAT}]',
    "/v1/responses": f'{_SAMPLING}, "max_output_tokens": 1, "input": "{PROMPT}"',
    "/invocations": f'{_SAMPLING}, "max_tokens": 1, "prompt": "{PROMPT}"',
}
STREAMING = frozenset(CARRYING) - {"/v1/chat/completions/batch"}

Answer = Literal["named", "openai", "framework"]
"""An error in OpenAI's form that names a field; one that may name none, since vLLM gives it; or that of the HTTP
framework for a request that no route sees: of a path or a method that is not there, or of compressed JSON."""
_PIECE = 1 << 16


@dataclass(frozen=True)
class Case:
    """A request that must be refused."""

    name: str
    method: str
    target: str
    """Path and query as they are sent, byte for byte."""
    body: bytes = b""
    content_type: str | None = JSON
    headers: tuple[tuple[str, str], ...] = ()
    chunked: bool = False
    """Sent in chunks, with no length given beforehand."""
    answer: Answer = "named"
    """What is to be said of it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.method} {self.target[:80]}"


def send(client: httpx.Client, case: Case) -> httpx.Response:
    """Send a case on a connection of ``client`` and return the response."""
    headers = dict(case.headers)
    if case.content_type is not None:
        headers["content-type"] = case.content_type
    content: Any = _pieces(case.body) if case.chunked else case.body
    target = {"target": case.target.encode("latin-1")}  # else httpx would repair it
    return client.request(case.method, "/", content=content, headers=headers, extensions=target)


def _pieces(body: bytes) -> Iterator[bytes]:
    for at in range(0, len(body), _PIECE):
        yield body[at : at + _PIECE]


def fault(case: Case, response: httpx.Response) -> str | None:
    """Return what is wrong with the response, or None if it is 4xx in OpenAI's form with reason and field."""
    if not 400 <= response.status_code < 500:
        return f"{case}: HTTP {response.status_code}: {response.text[:300]}"
    if case.answer == "framework":
        return None if len(response.content) < 200 else f"{case}: {response.text[:300]}"
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"{case}: not OpenAI's form: {response.text[:300]}"
    if set(error) != {"message", "type", "param", "code"} or error["code"] != response.status_code:
        return f"{case}: not OpenAI's form: {response.text[:300]}"
    if not isinstance(error["message"], str) or not error["message"].strip():
        return f"{case}: no message: {response.text[:300]}"
    if case.answer == "named" and not (isinstance(error["param"], str) and error["param"]):
        return f"{case}: names no field: {response.text[:300]}"
    if len(response.content) > 4096:
        return f"{case}: an error of {len(response.content)} bytes"
    return None


def greedy(client: httpx.Client) -> dict[str, Any]:
    """Return a plain greedy completion without the parts that differ between any two."""
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 5}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return {key: value for key, value in answer.items() if key not in ("id", "created")}

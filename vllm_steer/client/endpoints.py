# SPDX-License-Identifier: Apache-2.0
"""Requests of the clients as values, and the parts that several of them share."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from vllm_steer.client.encoding import to_json
from vllm_steer.client.responses import Completion, parse_completion
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
    """Return a request that generates; raise SteeringError for a stream where the answer comes as a whole."""
    if body.get("stream") and not stream:
        raise SteeringError("stream", "is not supported here, where the answer comes as a whole; use stream_chat")
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
    """Return the URL of a server; raise SteeringError unless it begins with http:// or https://."""
    scheme, found, _ = url.partition("://")
    if not found:
        raise SteeringError("url", f"{url!r} has no scheme; write http://{url}")
    if scheme.lower() not in ("http", "https"):
        raise SteeringError("url", f"{url!r} must begin with http:// or https://")
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

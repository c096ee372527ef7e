# SPDX-License-Identifier: Apache-2.0
"""Requests of the clients as values, shared by the synchronous and the asynchronous client."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from vllm_steer.client.encoding import to_json
from vllm_steer.client.responses import CaptureAnswer, Completion, Rows, parse_completion, read_capture_file
from vllm_steer.errors import SteeringError
from vllm_steer.registry.schema import Deleted, GlobalSteering, LiveStrengths, ModuleInfo, ModuleList

if TYPE_CHECKING:
    from vllm_steer.patching import PatchingResult

T = TypeVar("T")
_ROOT = "/v1/steering"


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

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Build the HTTP request."""
        headers = {} if self.content is None else {"content-type": "application/octet-stream"}
        return http.build_request(
            self.method, self.path, json=self.json, content=self.content, params=self.params, headers=headers
        )


def register(name: str, content: Mapping[str, Any]) -> Endpoint[ModuleInfo]:
    body = {"name": name, **_without_none(content, "module")}
    return Endpoint("POST", f"{_ROOT}/modules", _parse_module, json=body)


def register_file(name: str, source: str | Path | bytes) -> Endpoint[ModuleInfo]:
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    return Endpoint("POST", f"{_ROOT}/modules", _parse_module, content=data, params={"name": name})


def list_modules() -> Endpoint[ModuleList]:
    return Endpoint("GET", f"{_ROOT}/modules", lambda response: ModuleList.model_validate_json(response.content))


def get_module(reference: str, data: bool) -> Endpoint[ModuleInfo]:
    return Endpoint("GET", _module_path(reference), _parse_module, params=_data_param(data))


def delete_module(reference: str) -> Endpoint[Deleted]:
    # Not idempotent: after the first attempt, the module does not exist.
    parse: Callable[[httpx.Response], Deleted] = lambda response: Deleted.model_validate_json(response.content)  # noqa: E731
    return Endpoint("DELETE", _module_path(reference), parse, idempotent=False)


def set_steering(change: Mapping[str, Any]) -> Endpoint[GlobalSteering]:
    return Endpoint("POST", f"{_ROOT}/set", _parse_steering, json=_without_none(change, "set"))


def clear_steering() -> Endpoint[GlobalSteering]:
    return Endpoint("POST", f"{_ROOT}/clear", _parse_steering)


def get_steering(data: bool) -> Endpoint[GlobalSteering]:
    return Endpoint("GET", f"{_ROOT}/set", _parse_steering, params=_data_param(data))


def set_strength(request_id: str, strengths: Mapping[str, float]) -> Endpoint[LiveStrengths]:
    parse: Callable[[httpx.Response], LiveStrengths] = lambda response: LiveStrengths.model_validate_json(  # noqa: E731
        response.content
    )
    path = f"{_ROOT}/requests/{quote(request_id, safe='')}"
    return Endpoint("POST", path, parse, json=to_json(dict(strengths), "strengths"))


def served_model() -> Endpoint[str]:
    return Endpoint("GET", "/v1/models", _parse_first_model)


def capabilities() -> Endpoint[dict[str, Any]]:
    return Endpoint("GET", f"{_ROOT}/capabilities", lambda response: dict(response.json()))


def tokenize(model: str, text: str, special: bool) -> Endpoint[list[int]]:
    body = {"model": model, "prompt": text, "add_special_tokens": special}
    return Endpoint("POST", "/tokenize", lambda response: list(response.json()["tokens"]), json=body)


def detokenize(model: str, tokens: Sequence[int]) -> Endpoint[str]:
    body = to_json({"model": model, "tokens": tokens}, "body")
    return Endpoint("POST", "/detokenize", lambda response: str(response.json()["prompt"]), json=body)


def stream_patch(study: Mapping[str, Any]) -> Endpoint[None]:
    body = {**_without_none(study, "study"), "stream": True}
    return Endpoint("POST", f"{_ROOT}/patch", lambda _: None, json=body, idempotent=False)


def study_result(event: Mapping[str, Any]) -> PatchingResult:
    """Return the result in the last event of a study that asked for its file."""
    from vllm_steer.patching.file import decode

    return decode(base64.b64decode(event["file"]), "the server's answer")


def complete(model: str, prompt: Any, fields: Mapping[str, Any]) -> Endpoint[Completion]:
    _refuse_stream(fields)
    return _generate("/v1/completions", {"model": model, "prompt": prompt, **fields})


def chat(model: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Endpoint[Completion]:
    _refuse_stream(fields)
    return _generate("/v1/chat/completions", {"model": model, "messages": list(messages), **fields})


def stream_chat(model: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Endpoint[Completion]:
    return _generate("/v1/chat/completions", {"model": model, "messages": list(messages), **fields, "stream": True})


def fetch(capture: CaptureAnswer | str) -> Endpoint[dict[tuple[str, int], Rows]]:
    capture_id = capture if isinstance(capture, str) else capture.id
    if capture_id is None:
        raise SteeringError("capture", "has no rows to fetch: they are part of the answer, or the capture failed")
    path = f"/v1/captures/{quote(capture_id, safe='')}"
    return Endpoint("GET", path, lambda response: read_capture_file(response.content))


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


def _generate(path: str, body: Mapping[str, Any]) -> Endpoint[Completion]:
    parse: Callable[[httpx.Response], Completion] = lambda response: parse_completion(response.json())  # noqa: E731
    return Endpoint("POST", path, parse, json=to_json(body, "body"), idempotent=False)


def _refuse_stream(fields: Mapping[str, Any]) -> None:
    if fields.get("stream"):
        raise SteeringError("stream", "is not supported here, where the answer comes as a whole; use stream_chat")


def _without_none(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    encoded: dict[str, Any] = to_json({key: value for key, value in fields.items() if value is not None}, name)
    return encoded


def _module_path(reference: str) -> str:
    return f"{_ROOT}/modules/{quote(reference, safe='')}"


def _data_param(data: bool) -> dict[str, str]:
    return {"data": "true"} if data else {}


def _parse_module(response: httpx.Response) -> ModuleInfo:
    return ModuleInfo.model_validate_json(response.content)


def _parse_steering(response: httpx.Response) -> GlobalSteering:
    return GlobalSteering.model_validate_json(response.content)


def _parse_first_model(response: httpx.Response) -> str:
    try:
        return str(response.json()["data"][0]["id"])
    except (LookupError, TypeError):
        raise ValueError("the server's list of models has an unexpected form") from None

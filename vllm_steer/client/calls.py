# SPDX-License-Identifier: Apache-2.0
"""The requests that the clients make: each as a value, so that both clients share all but the sending."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from vllm_steer.client.answers import CaptureAnswer, Completion, Rows, completion_of, sites_of_file
from vllm_steer.client.packing import jsonable
from vllm_steer.errors import SteeringError
from vllm_steer.registry.schema import Deleted, GlobalSteering, ModuleInfo, ModuleList

T = TypeVar("T")
ROOT = "/v1/steering"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request and how its answer is read."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    body: Any = None
    content: bytes | None = None
    query: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    """Whether asking twice leaves things as asking once does, so that a lost answer may be asked for again."""

    def arguments(self) -> dict[str, Any]:
        """For httpx."""
        found: dict[str, Any] = {"method": self.method, "url": self.path, "params": dict(self.query)}
        if self.content is not None:
            found |= {"content": self.content, "headers": {"content-type": "application/octet-stream"}}
        elif self.body is not None:
            found["json"] = self.body
        return found


def register(name: str, content: Mapping[str, Any]) -> Call[ModuleInfo]:
    body = {"name": name, **jsonable({key: each for key, each in content.items() if each is not None}, "module")}
    return Call("POST", f"{ROOT}/modules", _info, body=body)


def register_file(name: str, source: str | Path | bytes) -> Call[ModuleInfo]:
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    return Call("POST", f"{ROOT}/modules", _info, content=data, query={"name": name})


def modules() -> Call[ModuleList]:
    return Call("GET", f"{ROOT}/modules", lambda answer: ModuleList.model_validate_json(answer.content))


def module(reference: str, data: bool) -> Call[ModuleInfo]:
    return Call("GET", _module_path(reference), _info, query={"data": "true"} if data else {})


def delete(reference: str) -> Call[Deleted]:
    # Not repeatable: a second time, there is nothing to delete.
    return Call("DELETE", _module_path(reference), lambda a: Deleted.model_validate_json(a.content), repeatable=False)


def set_steering(change: Mapping[str, Any]) -> Call[GlobalSteering]:
    body = jsonable({key: each for key, each in change.items() if each is not None}, "set")
    return Call("POST", f"{ROOT}/set", _steering, body=body)


def clear() -> Call[GlobalSteering]:
    return Call("POST", f"{ROOT}/clear", _steering)


def status(data: bool) -> Call[GlobalSteering]:
    return Call("GET", f"{ROOT}/set", _steering, query={"data": "true"} if data else {})


def served_models() -> Call[str]:
    def first(answer: httpx.Response) -> str:
        try:
            return str(answer.json()["data"][0]["id"])
        except (LookupError, TypeError):
            raise ValueError("the list of models is not as vLLM's is") from None

    return Call("GET", "/v1/models", first)


def complete(model: str, prompt: Any, fields: Mapping[str, Any]) -> Call[Completion]:
    return _generate("/v1/completions", {"model": model, "prompt": prompt, **fields})


def chat(model: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Call[Completion]:
    return _generate("/v1/chat/completions", {"model": model, "messages": list(messages), **fields})


def fetch(capture: CaptureAnswer | str) -> Call[dict[tuple[str, int], Rows]]:
    handle = capture if isinstance(capture, str) else capture.id
    if handle is None:
        raise SteeringError("capture", "has no rows to be fetched: it has them already, or has failed")
    return Call("GET", f"/v1/captures/{quote(handle, safe='')}", lambda answer: sites_of_file(answer.content))


def headers(api_key: str | None) -> dict[str, str]:
    """Those of every request; raises SteeringError for a key that no header can carry."""
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or api_key != api_key.strip():
        # Not the key: whoever reads this may not be who may know it.
        raise SteeringError("api_key", "has characters that no key has: spaces, line ends or letters beyond ASCII")
    return {"authorization": f"Bearer {api_key}"}


def _generate(path: str, body: Mapping[str, Any]) -> Call[Completion]:
    read: Callable[[httpx.Response], Completion] = lambda answer: completion_of(answer.json())  # noqa: E731
    return Call("POST", path, read, body=jsonable(body, "body"), repeatable=False)


def _module_path(reference: str) -> str:
    return f"{ROOT}/modules/{quote(reference, safe='')}"


def _info(answer: httpx.Response) -> ModuleInfo:
    return ModuleInfo.model_validate_json(answer.content)


def _steering(answer: httpx.Response) -> GlobalSteering:
    return GlobalSteering.model_validate_json(answer.content)

# SPDX-License-Identifier: Apache-2.0
"""An application with API keys, and its clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from tests.server.application import make_app
from tests.server.fakes import FakeEngine
from vllm_steer.server import lifespan
from vllm_steer.server.auth.key_file import edit_keys
from vllm_steer.server.auth.keys import generate_key
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.middleware import SteeringMiddleware

EVERYTHING = tuple(Right)


def write_keys(
    path: Path, rights: Mapping[str, Iterable[Right]], limits: Mapping[str, Mapping[str, int]] | None = None
) -> dict[str, str]:
    """Write a key file and return the secrets by name."""
    made = {name: generate_key(name, tuple(each), (limits or {}).get(name, {})) for name, each in rights.items()}
    with edit_keys(path, create=True) as write:
        write(tuple(key for key, _ in made.values()))
    return {name: secret for name, (_, secret) in made.items()}


def make_guarded_app(path: Path, **flags: object) -> FastAPI:
    """Return a fake vLLM application with key file and middleware; startup adds the steering routes."""
    app = make_app(FakeEngine())
    vars(app.state.args).update(steering_keys=str(path), **flags)
    app.add_middleware(SteeringMiddleware)
    return app


async def start(app: FastAPI) -> FastAPI:
    """Run the startup of the server."""
    await lifespan._start({"type": "lifespan", "app": app})
    return app


def client_of(app: FastAPI, secret: str | None = None) -> httpx.AsyncClient:
    """Return a client that sends the secret, if given."""
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", headers=headers)


def rejected(response: httpx.Response, status: int) -> dict[str, Any]:
    """Assert that the response is an error in the format of OpenAI, and return the error."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert ("retry-after" in response.headers) == (status in (429, 503))
    return error

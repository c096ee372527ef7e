# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` without steering, with the plugin installed, beside one without the plugin."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.server import HIDDEN, MODEL, VLLM, environment, run_server
from tests.warm import run_warm

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello"},
}
FIELDS: dict[str, Any] = {
    "steering_vectors": {"post_block": {"1": [1.0] * HIDDEN}},
    "capture": {"memory": {"hooks": {"post_block": [1]}}},
}


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from run_server(model, [], tmp_path_factory.mktemp("log") / "server.log")


@pytest.fixture(scope="module")
def bare_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a server that loads no plugin."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    server = run_server(model, [], log, warm=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "none")
        started = next(server)
    yield started
    next(server, None)


_CHANGING = re.compile(
    rb'"(created|created_at|completed_at|id|item_id|request_id|system_fingerprint)": ?("[^"]*"|\d+(\.\d+)?)'
)
_OF_AN_EVENT = re.compile(rb'"(content|delta|text|sequence_number)": ?("(?:[^"\\]|\\.)*"|\d+)')
"""Values that depend on how many tokens an event has, which depends on when the client reads."""
_CHANGING_HEADERS = {"date", "content-length"}


READS = 5
"""Answers that are read until they are equal: a client that reads late gets all tokens in the last event."""


def answer(url: str, route: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """Return status, headers and bytes of an answer without ids and times."""
    response = httpx.post(f"{url}{route}", json=body, headers={"X-Request-Id": "one"}, timeout=60)
    headers = [(name, value) for name, value in response.headers.items() if name not in _CHANGING_HEADERS]
    content = _CHANGING.sub(rb'"\1":0', response.content)
    events = _OF_AN_EVENT.sub(rb'"\1":0', content).split(b"\n\n") if body["stream"] else [content]
    return response.status_code, headers, list(dict.fromkeys(events))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_responses_are_stock_vllms(route: str, stream: bool, url: str, bare_url: str) -> None:
    """Catches a byte or a header of ours in the responses of a server that does not steer."""
    length = {"max_output_tokens" if route == "/v1/responses" else "max_tokens": 12}
    body = {"model": MODEL, "stream": stream, "temperature": 0, **length, **BODIES[route]}
    for more in ({}, {"temperature": "hot"}, {"metadata": {"a": "b"}}, {"no_field_of_vllm": 1}):
        for _ in range(READS):
            ours, stock = (answer(each, route, {**body, **more}) for each in (url, bare_url))
            if ours == stock:
                break
        assert ours == stock
        assert ours[0] == (400 if "temperature" in more else 200)


@pytest.mark.parametrize(
    "path", ["/openapi.json", "/v1/steering", "/v1/steering/modules", "/v1/captures/x", "/metrics"]
)
def test_routes_are_stock_vllms(path: str, url: str, bare_url: str) -> None:
    """Catches a route, a schema or a metric of ours on a server that does not steer."""
    ours, stock = (httpx.get(f"{each}{path}", timeout=60) for each in (url, bare_url))
    assert (ours.status_code, set(ours.headers)) == (stock.status_code, set(stock.headers))
    if path == "/metrics":
        names = [{line.split("{")[0].split(" ")[0] for line in each.text.splitlines()} for each in (ours, stock)]
        assert names[0] == names[1] and len(names[0]) > 20
    elif path == "/openapi.json":
        assert ours.json() == stock.json()
    else:
        assert ours.status_code == 404 and ours.content == stock.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_stock_server_refuses_fields(route: str, stream: bool, url: str) -> None:
    """Catches a fluent but unsteered response of a server without steering."""
    body = {"model": MODEL, "stream": stream, **BODIES[route]}
    for name, value in FIELDS.items():
        refused = httpx.post(f"{url}{route}", json={**body, name: value}, timeout=60)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["param"] == name
        assert "--enable-steering" in error["message"]
    assert httpx.post(f"{url}{route}", json=body, timeout=60).status_code == 200


def test_a_stock_server_refuses_limits(tmp_path: Path) -> None:
    """Catches a server that ignores a steering limit on its command line, and flags unknown to `vllm`."""
    command = ("vllm", "serve", str(tmp_path), "--steering-max-rows", "8")
    result = run_warm(VLLM, *command, environment=environment(), folder=tmp_path)
    assert result.returncode == 2
    assert "--steering-max-rows: has no effect without --enable-steering" in result.stderr
    assert "Traceback" not in result.stderr

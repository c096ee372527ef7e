# SPDX-License-Identifier: Apache-2.0
"""Bodies that are drawn by grammar, against a real server: no status 5xx, no cut stream, and a live event loop.

A bounded run is part of ``make test``. ``HOSTILE_MINUTES=10 make test ARGS=tests/server/hostile/test_grammar.py`` draws
other bodies for ten minutes, and then also fails if the event loop stands still for longer than ``STANDSTILL``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.server.hostile.case import CLEAR
from tests.server.hostile.grammar import encoded, requests
from tests.server.server import run_server

MINUTES = float(os.environ.get("HOSTILE_MINUTES", "0"))
STANDSTILL = 0.2
"""Seconds that the event loop may stand still, beyond the time in which Python parses the body, as vLLM does."""
ATTEMPTS = 3
"""Times that a body may be sent until the loop stands still for less: one of the machine does not recur."""
HEARTBEAT, PERIOD = "/heartbeat", 0.005
"""Route that returns the longest standstill in seconds, and the seconds between two measurements."""


def find_fault(response: httpx.Response, stream: bool) -> str | None:
    """Return what is wrong with a response, or None."""
    if response.status_code >= 500:
        return f"HTTP {response.status_code}"
    text = response.text
    if response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"):
        ends = ("data: [DONE]", "event: response.completed", "response.incomplete", "event: summary", "event: error")
        if not stream or not any(end in text for end in ends) or "Traceback" in text:
            return "a cut stream"
        if '"code":400' in text.replace(" ", "") or "event: error" in text:
            return "an error in a stream that should be a refusal"
    if response.status_code >= 400 and "error" not in response.json():
        return "no error object"
    return None


class Heartbeat:
    """Middleware that measures in the server's event loop how late a callback runs; the test loads it there by name.

    A client outside would also wait for a core, of which engine and server have fewer than threads.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._longest, self._last = 0.0, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == HEARTBEAT:
            if not self._last:
                self._beat()
            await PlainTextResponse(str(self._longest))(scope, receive, send)
            self._longest = 0.0
            return
        await self._app(scope, receive, send)

    def _beat(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last - PERIOD if self._last else 0.0)
        self._last = now
        asyncio.get_running_loop().call_later(PERIOD, self._beat)


@pytest.fixture
def watched(model: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """Return a client of a server with the middleware."""
    flags = ["--enable-steering", "--steering-max-body-mib", "1", "--middleware", f"{__name__}.{Heartbeat.__name__}"]
    for url in run_server(model, flags, tmp_path / "log", worker_process=True):
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client


@pytest.mark.failure(14)
def test_bodies_by_grammar(client: httpx.Client) -> None:
    """Catches a body that breaks a route or cuts a stream."""

    def check(request: tuple[str, Any]) -> None:
        post(client, *request)

    draw(check, derandomize=True)
    client.post(CLEAR)
    assert client.get("/health").status_code == 200


@pytest.mark.failure(14)
@pytest.mark.skipif(not MINUTES, reason="runs for HOSTILE_MINUTES")
def test_bodies_by_grammar_for_minutes(watched: httpx.Client) -> None:
    """Catches a body that breaks a route, cuts a stream, or stops the server's event loop each time it is sent."""
    deadline = time.monotonic() + 60 * MINUTES

    def longest() -> float:
        return float(watched.get(HEARTBEAT).text)

    def check(request: tuple[str, Any]) -> None:
        if time.monotonic() > deadline:
            return
        waits: list[float] = []
        while len(waits) < ATTEMPTS:
            longest()
            data = post(watched, *request)
            waits.append(longest())
            started = time.monotonic()
            httpx.Response(200, content=data).json()
            if waits[-1] <= STANDSTILL + time.monotonic() - started:
                return
        raise AssertionError(f"standstills of {waits} s: {request[0]} {data[:2000]!r}")

    while time.monotonic() < deadline:
        draw(check)
    assert watched.get("/health").status_code == 200


def post(client: httpx.Client, route: str, body: Any) -> bytes:
    """Send a body, fail if the response has a fault, undo what it has set, and return what was sent."""
    data = encoded(body)
    response = client.post(route, content=data, headers={"content-type": "application/json"}, timeout=120)
    fault = find_fault(response, bool(isinstance(body, dict) and body.get("stream")))
    assert fault is None, f"{fault}: {route} {data[:2000]!r}: {response.text[:1000]}"
    client.post(CLEAR)
    return data


def draw(check: Callable[[Any], Any], bodies: Any = requests, derandomize: bool = False) -> None:
    """Call ``check`` with requests of the grammar, or with other bodies."""
    drawn = settings(
        max_examples=120,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
    )
    drawn(given(bodies)(check))()


def test_the_check_rejects_broken_responses() -> None:
    """Negative control: catches a check that accepts what a broken server sends."""
    events = {"content-type": "text/event-stream"}
    for response in (
        httpx.Response(500, json={"error": {}}),
        httpx.Response(200, text='data: {"choices":[]}\n\n', headers=events),
        httpx.Response(200, text='data: {"error":{"code":400}}\n\ndata: [DONE]\n\n', headers=events),
        httpx.Response(404, json={"detail": "x"}),
    ):
        assert find_fault(response, stream=True) is not None, response.text
    done = httpx.Response(200, text='data: {"choices":[]}\n\ndata: [DONE]\n\n', headers=events)
    assert find_fault(done, stream=True) is None


async def test_the_heartbeat_sees_a_standstill() -> None:
    """Negative control: catches a measurement that finds every event loop alive."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        time.sleep(2 * STANDSTILL)
        await PlainTextResponse("done")(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(Heartbeat(app)), base_url="http://server") as client:
        await client.get(HEARTBEAT)
        await client.get("/")
        await asyncio.sleep(2 * PERIOD)
        assert float((await client.get(HEARTBEAT)).text) > STANDSTILL

# SPDX-License-Identifier: Apache-2.0
"""Bodies that are drawn by grammar, against a real server: no status 5xx, no cut stream, and a live event loop.

A bounded run is part of ``make test``. ``HOSTILE_MINUTES=10 make test ARGS=tests/server/hostile/test_grammar.py`` draws
other bodies for ten minutes, and then also fails if another client waits longer than ``STANDSTILL`` for an answer.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.server.hostile.case import CLEAR
from tests.server.hostile.grammar import encoded, requests

MINUTES = float(os.environ.get("HOSTILE_MINUTES", "0"))
STANDSTILL = 0.2
"""Seconds that another client may wait, beyond the time in which Python parses the body, as vLLM does."""
ATTEMPTS = 3
"""Times that a body may be sent until no other client waits longer."""


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


class Watch:
    """A client in a process of its own, which the GIL of this one cannot delay, that measures how long answers take."""

    def __init__(self, url: httpx.URL) -> None:
        self._pipe, far = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=measure, args=(str(url), far), daemon=True)
        self._process.start()
        self.restart()

    def restart(self) -> float:
        """Return the longest wait in seconds since the last call, and begin anew."""
        self._pipe.send(None)
        longest: float = self._pipe.recv()
        return longest

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def measure(url: str, pipe: Connection) -> None:
    """Ask for an answer without work, again and again; send the longest wait when the pipe asks for it."""
    longest = 0.0
    with httpx.Client(base_url=url, timeout=60) as client:
        while True:
            started = time.monotonic()
            client.get("/version")
            longest = max(longest, time.monotonic() - started)
            if pipe.poll(0.005):
                pipe.recv()
                pipe.send(longest)
                longest = 0.0


@pytest.mark.failure(14)
def test_bodies_by_grammar(client: httpx.Client) -> None:
    """Catches a body that breaks a route, cuts a stream or, in a long run, stops the server for others."""
    deadline = time.monotonic() + 60 * MINUTES
    watch = Watch(client.base_url) if MINUTES else None

    def check(request: tuple[str, Any]) -> None:
        route, body = request
        if MINUTES and time.monotonic() > deadline:
            return
        data = encoded(body)
        waits: list[float] = []
        # A standstill that the body causes comes each time; one of the machine does not.
        while len(waits) < ATTEMPTS:
            if watch is not None:
                watch.restart()
            response = client.post(route, content=data, headers={"content-type": "application/json"}, timeout=120)
            fault = find_fault(response, bool(isinstance(body, dict) and body.get("stream")))
            assert fault is None, f"{fault}: {route} {data[:2000]!r}: {response.text[:1000]}"
            waits.append(0.0 if watch is None else watch.restart())
            client.post(CLEAR)
            started = time.monotonic()
            httpx.Response(200, content=data).json()
            allowed = STANDSTILL + time.monotonic() - started
            if waits[-1] <= allowed:
                return
        raise AssertionError(f"waits of {waits} s: {route} {data[:2000]!r}")

    try:
        draw = settings(
            max_examples=120,
            deadline=None,
            database=None,
            derandomize=not MINUTES,
            suppress_health_check=list(HealthCheck),
        )(given(requests)(check))
        draw()
        while time.monotonic() < deadline:
            draw()
    finally:
        if watch is not None:
            watch.end()
        client.post(CLEAR)
    assert client.get("/health").status_code == 200


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

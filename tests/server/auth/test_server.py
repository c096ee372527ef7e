# SPDX-License-Identifier: Apache-2.0
"""Tests of API keys on vLLM's own server: rights, ``--api-key``, and separate prefix caches."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.auth.guarded import EVERYTHING, write_keys
from tests.server.requests import LIST
from tests.server.server import HIDDEN, LAYERS, MODEL, run_server
from vllm_steer.client import Client, Retry, ServerError
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.routes.base import PLUGIN_PREFIXES

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BLOCK = 32
STEERED: dict[str, Any] = {"steering_vectors": {"post_block": {"0": LIST}}}
CAPTURED: dict[str, Any] = {"capture": {"memory": {"hooks": {"post_block": "all"}, "positions": "all"}}}


@dataclass
class GuardedServer:
    """A server with API keys, and clients for it."""

    url: str
    secrets: dict[str, str]

    def as_(self, name: str | None) -> httpx.Client:
        headers = {} if name is None else {"authorization": f"Bearer {self.secrets.get(name, name)}"}
        # Without verification, which would load all certificates for each client.
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, verify=False)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    rights = {"alice": EVERYTHING, "bob": EVERYTHING, "plain": (), "few": (Right.STEER, Right.CAPTURE)}
    secrets = write_keys(path, rights, {"few": {"steering_requests": 2, "steering_programs": 1, "capture_mib": 1}})
    flags = ["--steering-keys", str(path), "--api-key", "vllms", "--enable-prompt-tokens-details"]
    flags += ["--block-size", str(BLOCK), "--capture-inline-kib", "1"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    for url in run_server(model, ["--enable-steering", *flags], log, warm=True):
        yield GuardedServer(url, secrets)


def cached_tokens(answer: httpx.Response) -> int:
    """Return the number of prompt tokens served from the cache."""
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)


PROMPTS = iter(string.ascii_letters)
"""One for each test, so that none finds what another has left."""


@pytest.mark.parametrize("fields", [{}, STEERED], ids=["plain", "steered"])
def test_keys_share_no_prefix_cache(fields: dict[str, Any], server: GuardedServer) -> None:
    """Catches blocks shared between keys or not shared within one, and an ignored or unsafe ``cache_salt``."""
    body = {"model": MODEL, "prompt": next(PROMPTS) * (4 * BLOCK), "max_tokens": 2, "temperature": 0, **fields}

    def ask(name: str, **more: Any) -> int:
        with server.as_(name) as client:
            return cached_tokens(client.post(COMPLETIONS, json={**body, **more}))

    assert (ask("alice"), ask("alice") >= BLOCK) == (0, True)
    assert (ask("bob"), ask("bob") >= BLOCK) == (0, True)
    assert (ask("alice", cache_salt="mine"), ask("alice", cache_salt="mine") >= BLOCK) == (0, True)
    assert ask("bob", cache_salt="mine") == 0
    if fields != STEERED:  # the control: with one of vLLM's keys there is one cache, as without any
        assert (ask("vllms"), ask("vllms") >= BLOCK) == (0, True)
        assert ask("plain") == 0
    assert ask("alice") >= BLOCK


def test_samples_are_salted_like_their_request(server: GuardedServer) -> None:
    """Catches a sample that is salted twice or not at all."""
    body = {"model": MODEL, "prompt": next(PROMPTS) * (4 * BLOCK), "max_tokens": 2}
    counts = []
    for name, more in (("alice", {"n": 3}), ("alice", {}), ("bob", {}), ("vllms", {}), ("bob", {"n": 3})):
        with server.as_(name) as client:
            counts.append(cached_tokens(client.post(COMPLETIONS, json={**body, **more})))
    assert [count >= BLOCK for count in counts[1:]] == [True, False, False, True]


def test_all_routes_salt_requests(server: GuardedServer) -> None:
    """Catches a route or a stream whose requests are not salted."""

    def message() -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": next(PROMPTS) * (4 * BLOCK)}], "max_tokens": 2}

    bodies = {
        CHAT: message(),
        "/v1/messages": message(),
        RESPONSES: {"input": next(PROMPTS) * (4 * BLOCK), "max_output_tokens": 2},
    }
    for route, body in bodies.items():
        counts = []
        for name in ("alice", "alice", "bob", "bob"):
            with server.as_(name) as client:
                counts.append(cached_tokens(client.post(route, json={"model": MODEL, **body})))
        assert [count >= BLOCK for count in counts] == [False, True, False, True], (route, counts)
    body = {"model": MODEL, "prompt": next(PROMPTS) * (4 * BLOCK), "max_tokens": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    streamed = []
    for name in ("alice", "alice", "bob"):
        with server.as_(name) as client:
            events = [line[6:] for line in client.post(COMPLETIONS, json=body).text.splitlines() if "usage" in line]
            details = json.loads(events[-1])["usage"]["prompt_tokens_details"] or {}
            streamed.append(details.get("cached_tokens") or 0)
    assert (streamed[0], streamed[1] >= BLOCK, streamed[2]) == (0, True, 0)


def test_rights_on_vllm_server(server: GuardedServer) -> None:
    """Catches rights that vLLM's routes, error handling or authentication bypass."""
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 1}
    expected = {
        None: (401, 401, 401),
        "wrong": (401, 401, 401),
        "vllms": (200, 403, 403),
        "plain": (200, 403, 403),
        "few": (200, 200, 403),
        "alice": (200, 200, 200),
    }
    for name, statuses in expected.items():
        with server.as_(name) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/metrics", follow_redirects=True).status_code == 200
            plain, steered = (client.post(COMPLETIONS, json={**body, **more}) for more in ({}, STEERED))
            assert (plain.status_code, steered.status_code, client.get("/v1/steering/set").status_code) == statuses
            if steered.status_code != 200:
                assert set(steered.json()["error"]) == {"message", "type", "param", "code"}
            tokenized = client.post("/tokenize", json={"model": MODEL, "prompt": "abc"}).status_code
            assert tokenized == (200 if statuses[0] == 200 else 401)
    with server.as_("plain") as client:
        assert client.post("/reset_prefix_cache").status_code == 403
        paths = client.get("/openapi.json")
        assert paths.status_code == 403
    with server.as_("alice") as client:
        paths = client.get("/openapi.json").json()["paths"]
        operations = [
            operation for path, each in paths.items() if path.startswith(PLUGIN_PREFIXES) for operation in each.values()
        ]
        assert len(operations) >= 10 and all(operation["x-steering-right"] in list(Right) for operation in operations)


def test_limits_on_vllm_server(server: GuardedServer) -> None:
    """Catches errors whose status or Retry-After vLLM's error handling replaces, on any route and in streams."""
    requests = {COMPLETIONS: {"prompt": "abc" * 20}, CHAT: {"messages": [{"role": "user", "content": "abc" * 20}]}}
    rows = {**CAPTURED, "max_tokens": 200, "n": 30}
    assert 30 * 200 * LAYERS * HIDDEN * 4 > 1 << 20
    with server.as_("few") as client:
        for route, body in requests.items():
            for stream in (False, True):
                answer = client.post(route, json={"model": MODEL, **body, **rows, "stream": stream})
                assert answer.status_code == 413, answer.text
                error = answer.json()["error"]
                assert (error["param"], error["code"], error["type"]) == ("capture", 413, "RequestEntityTooLargeError")


def test_captures_are_private_to_their_key(server: GuardedServer) -> None:
    """Catches captures of one key that another key can fetch."""
    body = {"model": MODEL, "prompt": "abc" * 20, "max_tokens": 2, **CAPTURED}
    with server.as_("alice") as alice, server.as_("bob") as bob:
        report = alice.post(COMPLETIONS, json=body).json()["choices"][0]["capture_results"]["memory"]
        assert bob.get(f"/v1/captures/{report['id']}").status_code == 404
        assert len(alice.get(f"/v1/captures/{report['id']}").content) == report["bytes"]


def test_disconnected_clients_release_their_quota(server: GuardedServer) -> None:
    """Catches leaked reservations: a key limited to two requests disconnects a dozen times."""
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 200, "stream": True, "ignore_eos": True}
    retry = Retry(attempts=20, first=0.05, longest=0.5)
    with Client(server.url, api_key=server.secrets["few"], model=MODEL, retry=retry) as client:
        for number in range(12):
            vector = [float(number + 1)] * HIDDEN
            steering = {"steering_vectors": {"post_block": {"0": vector}}}
            with server.as_("few") as other, other.stream("POST", COMPLETIONS, json={**body, **steering}) as answer:
                if answer.status_code == 200:
                    next(answer.iter_bytes())
            client.complete("abc", max_tokens=1, **steering)  # comes again until there is room for it
    with Client(server.url, api_key=server.secrets["plain"], model=MODEL) as client:
        client.complete("abc", max_tokens=1)
        with pytest.raises(ServerError, match="steer"):
            client.complete("abc", max_tokens=1, **STEERED)

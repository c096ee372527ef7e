# SPDX-License-Identifier: Apache-2.0
"""Two real servers on one registry in PostgreSQL, as behind a router, of which one is killed.

``tests/server/test_server_modules.py`` shares a folder between processes in the same way, and ``tests/registry`` tests
the storage without engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.postgresql import PASSWORD, PostgresServer, postgres_server
from tests.server.registrations import MODULES, register_during_a_kill
from tests.server.requests import PACKED, V
from tests.server.server import MODEL, run_server

__all__ = ["postgres_server"]

SITE = {"post_block": {"1": PACKED}}


class Server:
    """A running server."""

    def __init__(self, url: str, log: Path, stack: contextlib.ExitStack) -> None:
        self.log, self._stack = log, stack
        self.http = httpx.Client(base_url=url, timeout=60)

    def kill(self) -> None:
        self._stack.close()

    def call(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        response = self.http.request(method, path, json=body or None)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def complete(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        body = {"model": MODEL, "prompt": "Hello there", "temperature": 0, "max_tokens": 8, **fields}
        answer = self.call("POST", "/v1/completions", **body)
        return answer["choices"][0]["text"], answer.get("steering_applied", {})


@pytest.fixture(scope="module")
def servers(
    model: Path, tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer
) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("two")
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # logs the arguments
    flags = ["--enable-steering", "--steering-registry", postgres_server.new_database()]

    def start(i: int) -> Server:
        stack, log = contextlib.ExitStack(), folder / f"{i}.log"
        run = contextlib.contextmanager(run_server)
        return Server(stack.enter_context(run(model, flags, log, warm=True)), log, stack)

    with ThreadPoolExecutor(2) as pool:  # both create the tables
        started = list(pool.map(start, range(2)))
    patch.undo()
    yield started
    for server in started:
        server.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_servers_share_a_registry(servers: list[Server]) -> None:
    """Catches a change that one server does not apply, changes lost between the servers, and a password that is shown.

    One test, because starts are expensive. Its last part kills a server that is making changes.
    """
    one, other = servers
    plain, inline = one.complete()[0], one.complete(steering_vectors=SITE)[0]
    assert plain != inline

    for i, (writer, reader) in enumerate([(one, other), (other, one)] * 2):
        vector = V if i % 2 else -V
        digest = writer.call("POST", MODULES, name="calm", base={"post_block": {"1": vector.tolist()}})["digest"]
        text, applied = reader.complete(steering_modules=["calm"])
        assert applied["modules"][0]["digest"] == digest
        assert (text == inline) == bool(i % 2)
    status = other.call("POST", "/v1/steering/set", base=SITE)
    text, applied = one.complete()
    assert (text, applied["global"], applied["epoch"]) == (inline, status["digest"], status["epoch"])
    one.call("POST", "/v1/steering/clear")
    assert other.complete() == (plain, {})

    urls = [str(server.http.base_url) for server in servers]
    acknowledged = register_during_a_kill(urls, one.kill, each=40, kill_at=10)
    assert {name.split(".")[1] for name in acknowledged} == {"0", "1", "2", "3"}
    found = {each["name"]: each for each in other.call("GET", MODULES)["data"]}
    assert {name: found[name]["digest"] for name in acknowledged} == acknowledged
    assert not [each for each in found.values() if each["problem"] is not None]
    assert other.complete(steering_modules=["m0.0.3"])[1]["modules"][0]["digest"] == acknowledged["m0.0.3"]

    shown = [other.http.get(path).text for path in ("/v1/steering/capabilities", "/v1/steering/set", MODULES)]
    assert not [text for text in (*shown, one.log.read_text(), other.log.read_text()) if PASSWORD in text]

# SPDX-License-Identifier: Apache-2.0
"""Large bodies are read in threads, and few of them at one time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from tests.server.fakes import vector
from tests.server.http.test_middleware import refusal
from vllm_steer.server.access_errors import ServerFullError
from vllm_steer.server.auth.current_key import current_key_name, use_key
from vllm_steer.server.auth.keys import Key
from vllm_steer.server.http import apply_fields, request_guard
from vllm_steer.server.http.body_checks import LARGE_BODY, BodyChecks

ROUTE = "/v1/completions"
EDIT: dict[str, Any] = {"kind": "add", "point": "post_block", "layers": 1, "vector": vector()}


async def test_bodies_beyond_the_queue_are_refused() -> None:
    """Catches bodies that fill the memory while they wait, and a place that is free while its thread still works."""
    checks, go_on = BodyChecks(threads=1, max_bodies=2), threading.Event()
    first, second = (asyncio.ensure_future(checks.run(go_on.wait)) for _ in range(2))
    await asyncio.sleep(0.05)
    with pytest.raises(ServerFullError):
        await checks.run(int)
    first.cancel()  # its client has left
    await asyncio.sleep(0)
    assert checks.bodies == 2
    go_on.set()
    assert await second
    while checks.bodies:
        await asyncio.sleep(0.01)
    assert await checks.run(int) == 0


async def test_the_thread_has_the_key_of_the_request() -> None:
    """Catches rights that are checked without the key, which allows everything."""
    with use_key(Key(name="mine", sha256="", cache_salt="")):
        assert await BodyChecks().run(current_key_name) == "mine"


@pytest.mark.parametrize("size", [0, LARGE_BODY])
async def test_large_bodies_are_compiled_in_a_thread(
    size: int, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an event loop that stands while a large body is compiled, and a body that is compiled twice."""
    threads: list[str] = []
    compile_json = apply_fields.compile_json_fields

    def compile_fields(fields: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_json(fields)

    monkeypatch.setattr(apply_fields, "compile_json_fields", compile_fields)
    response = await client.post(ROUTE, json={"prompt": "x" * size, "steering": [EDIT]})
    assert response.json()["steered"] is True
    assert [name.startswith("vllm-steer-body") for name in threads] == [size > 0]


async def test_a_full_queue_is_answered_with_503(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches HTTP 500, or a body that is read in the event loop instead."""
    monkeypatch.setattr(request_guard, "body_checks", lambda: BodyChecks(max_bodies=0))
    response = await client.post(ROUTE, json={"prompt": "x" * LARGE_BODY, "steering": [EDIT]})
    assert refusal(response, 503)["param"] == "body"


@pytest.mark.parametrize("place", ["body", "vllm_xargs"])
async def test_names_are_counted_before_they_are_compared(
    place: str, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches hundreds of thousands of names that are compared with ours, and names that are skipped instead."""
    from vllm_steer.server.http import misspelt_fields

    compared: list[str] = []
    monkeypatch.setattr(misspelt_fields, "resembles", lambda name, word: compared.append(name))
    for names in ({f"z\u4e00{i}": 1 for i in range(5000)}, {"z" * 70_000: 1}):
        body = {"prompt": "x", **(names if place == "body" else {"vllm_xargs": names})}
        assert refusal(await client.post(ROUTE, json=body))["param"] == place
    assert compared == []

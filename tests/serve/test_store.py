# SPDX-License-Identifier: Apache-2.0
"""Where rows wait to be fetched, and who may fetch them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from tests.serve.delivery import captured, done, make_capturing_app
from vllm_steer.serve.captures import store_of
from vllm_steer.serve.store import CaptureStore, StoreFullError, StoreLimits


def store_with(budget: int = 100, expiry: float = 60) -> CaptureStore:
    return CaptureStore(StoreLimits(inline_bytes=0, budget_bytes=budget, expiry_seconds=expiry))


async def test_the_budget_is_all_there_is() -> None:
    """Catches a budget that leaks: what was deleted and still counts, or what counts only once."""
    store = store_with(100)
    first = store.put(b"x" * 60)
    with pytest.raises(StoreFullError, match="60 of 100"):
        store.put(b"x" * 41)
    second = store.put(b"x" * 40)
    assert store.discard(first)
    assert not store.discard(first)
    third = store.put(b"y" * 60)
    assert len({first, second, third}) == 3
    assert (store.get(first), store.get(third)) == (None, b"y" * 60)
    with pytest.raises(StoreFullError):
        store.put(b"x")


async def test_rows_go_by_themselves() -> None:
    """Catches an idle server that keeps its last captures in memory until somebody asks for them."""
    store = store_with(100, expiry=0.05)
    store.put(b"x" * 100)
    await asyncio.sleep(0.3)
    assert len(store) == 0
    store.put(b"x" * 100)


async def test_authentication_stands_before_the_rows() -> None:
    """Catches rows that are given, or deleted, to whoever has no key of the server."""
    app = make_capturing_app([{"memory": done(captured())}])
    ours = app.user_middleware.pop()

    class Authentication:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            known = any(header == (b"authorization", b"Bearer key") for header in scope["headers"])
            await (self.app if known else JSONResponse({}, 401))(scope, receive, send)

    app.add_middleware(Authentication)
    app.user_middleware.insert(0, ours)  # outermost, where vLLM puts --middleware
    handle = store_of(app).put(b"rows")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for method in ("GET", "DELETE"):
            assert (await client.request(method, f"/v1/captures/{handle}")).status_code == 401
        response = await client.get(f"/v1/captures/{handle}", headers={"authorization": "Bearer key"})
    assert response.content == b"rows"

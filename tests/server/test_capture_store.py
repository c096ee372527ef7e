# SPDX-License-Identifier: Apache-2.0
"""Tests of the store for captures that are too large for a response."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.responses import JSONResponse

from tests.server.http.answers import captured, done, make_capturing_app
from vllm_steer.fs.shared_tempdir import shared_tempdir_path
from vllm_steer.server.capture_store import CaptureStore, StoreFullError, StoreLimits
from vllm_steer.server.routes.captures import capture_store_of


class Rows:
    """Stand-in for the rows in a request's context."""


request: ContextVar[Rows] = ContextVar("request")


@pytest.fixture
def name() -> str:
    """Return the name of this test's store."""
    return "test"


def store_of_name(name: str, budget: int = 100, expiry: float = 60) -> CaptureStore:
    return CaptureStore(StoreLimits(inline_bytes=0, budget_bytes=budget, expiry_seconds=expiry), name)


def content(store: CaptureStore, handle: str) -> bytes | None:
    stored = store.open(handle)
    if stored is None:
        return None
    with stored.file as file:
        return file.read()


def test_processes_share_the_budget(name: str) -> None:
    """Catches deleted captures that still count, and captures of other processes that do not."""
    one, other = store_of_name(name), store_of_name(name)
    first = one.put(b"x" * 60, "safetensors")
    with pytest.raises(StoreFullError, match="60 of 100"):
        other.put(b"x" * 41, "safetensors")
    second = other.put(b"x" * 40, "json")
    assert other.delete(first)
    assert not one.delete(first)
    third = one.put(b"y" * 60, "safetensors")
    assert len({first, second, third}) == 3
    assert (content(other, first), content(other, third), content(one, second)) == (None, b"y" * 60, b"x" * 40)
    with pytest.raises(StoreFullError):
        one.put(b"x", "json")


def test_concurrent_writers_stay_within_the_budget(name: str) -> None:
    """Catches a race between the check of the budget and the write."""
    stores = [store_of_name(name, budget=500) for _ in range(4)]

    def write(number: int) -> bool:
        try:
            stores[number % 4].put(bytes(50), "safetensors")
        except StoreFullError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(write, range(40))) == 10
    assert len(stores[0]) == 10


async def test_captures_expire_without_requests(name: str) -> None:
    """Catches an idle server that keeps expired captures until the next request."""
    store = store_of_name(name, expiry=0.05)
    await store.put_async(b"x" * 100, "safetensors")
    for _ in range(100):
        if not len(store):
            break
        await asyncio.sleep(0.05)
    assert len(store) == 0
    store.put(b"x" * 100, "safetensors")


async def test_timers_hold_no_request_context(name: str) -> None:
    """Catches rows kept in memory until their file expires, because the timer holds the request's context."""
    store = store_of_name(name)

    async def answer() -> weakref.ref[Rows]:
        rows = Rows()
        request.set(rows)
        await store.put_async(b"x", "safetensors")
        return weakref.ref(rows)

    gone = await asyncio.create_task(answer())
    for _ in range(100):
        gc.collect()
        if gone() is None:
            break
        await asyncio.sleep(0.05)
    assert gone() is None
    assert len(store) == 1


def test_expired_captures_are_neither_returned_nor_counted(name: str) -> None:
    """Catches files of killed processes that fill the store forever."""
    store = store_of_name(name)
    handle = store.put(b"x" * 100, "safetensors")
    (path,) = (path for path in shared_tempdir_path(name).iterdir() if path.suffix == ".safetensors")
    os.utime(path, (1, 1))
    half = path.with_name("0.part")
    half.write_bytes(b"x" * 100)
    os.utime(half, (1, 1))
    assert content(store, handle) is None
    store.put(b"x" * 100, "safetensors")
    assert not half.exists()


@pytest.mark.parametrize("handle", ["../secret", "/etc/passwd", "a" * 5000, "", "\udc80", "alive", "\0"])
def test_an_id_is_never_a_path(name: str, handle: str, tmp_path: Path) -> None:
    """Catches a client that reads or deletes files outside of the store."""
    (tmp_path / "secret").write_text("secret")
    store = store_of_name(name)
    kept = store.put(b"x", "safetensors")
    assert content(store, handle) is None
    assert not store.delete(handle)
    assert (content(store, kept), (tmp_path / "secret").read_text()) == (b"x", "secret")


def test_other_users_cannot_read_the_folder(name: str) -> None:
    """Catches captures readable by other users of the machine, and ids in file names."""
    store = store_of_name(name)
    handle = store.put(b"x", "safetensors")
    modes = {path.name: path.stat().st_mode & 0o777 for path in shared_tempdir_path(name).iterdir()}
    assert shared_tempdir_path(name).stat().st_mode & 0o777 == 0o700
    assert set(modes.values()) == {0o600}
    assert not any(handle in path for path in modes)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(0o755), lambda path: path.symlink_to("/tmp")])
def test_refuses_a_prepared_folder(name: str, make: Callable[[Path], None]) -> None:
    """Catches captures written into a folder that another user has prepared."""
    make(shared_tempdir_path(name))
    with pytest.raises(StoreFullError, match=r"only this user|Not a directory"):
        store_of_name(name).put(b"x", "safetensors")


def test_the_last_process_removes_the_folder(name: str) -> None:
    """Catches captures that outlive their server, and captures deleted when the first of its processes ends."""
    one, other = store_of_name(name), store_of_name(name)
    handle = one.put(b"x", "safetensors")
    other.put(b"y", "safetensors")
    other.close()
    assert content(other, handle) == b"x"
    one.close()
    assert not shared_tempdir_path(name).exists()
    one.close()


@pytest.mark.parametrize("tidy", [shutil.rmtree, lambda path: (path / "alive").unlink()])
def test_recreates_a_removed_folder(name: str, tidy: Callable[[Path], None]) -> None:
    """Catches a store that fails after a clean-up of temporary files, and a closing process that deletes captures."""
    old, other = store_of_name(name), store_of_name(name)
    old.put(b"x", "safetensors")
    tidy(shared_tempdir_path(name))
    handle = other.put(b"y", "safetensors")
    old.close()
    assert content(other, handle) == b"y"
    tidy(shared_tempdir_path(name))
    again = other.put(b"z", "safetensors")
    assert content(other, again) == b"z"
    other.close()
    assert not shared_tempdir_path(name).exists()


@pytest.mark.parametrize("call", ["ftruncate", "utime"])
def test_a_full_disk_leaves_nothing_behind(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches leaked descriptors and incomplete files after a failed write."""
    store = store_of_name(name)
    store.put(b"x", "safetensors")
    gc.collect()  # close descriptors that earlier tests left open
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as full:
        full.setattr(os, call, Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        for _ in range(3):
            with pytest.raises(StoreFullError, match="No space left"):
                store.put(b"y", "safetensors")
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(store) == 1


def test_tolerates_a_folder_removed_concurrently(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a failed write because another server of this user ended at the same time."""
    store = store_of_name(name)
    with monkeypatch.context() as listed:
        listed.setattr(Path, "glob", lambda folder, pattern: [folder / "vllm-steer-gone"])
        handle = store.put(b"x", "safetensors")
    assert content(store, handle) == b"x"


def test_a_process_without_shutdown_leaves_nothing_behind(name: str) -> None:
    """Catches files left by a process that exits without closing the store, such as a script."""
    script = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from vllm_steer.fs.shared_tempdir import remove_at_exit\n"
        "from vllm_steer.server.capture_store import CaptureStore, StoreLimits\n"
        "remove_at_exit('ends'); CaptureStore(StoreLimits(0, 100, 60), 'ends').put(b'x', 'safetensors')\n"
        "store = CaptureStore(StoreLimits(0, 100, 60), 'ends'); store.put(b'x', 'safetensors'); print('written')\n"
    )
    command = [sys.executable, "-c", script, tempfile.gettempdir()]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "written\n"
    assert not shared_tempdir_path("ends").exists()


def test_removes_the_folder_of_a_killed_server(name: str) -> None:
    """Catches temporary files that accumulate with every crash, and the removal of a running server's files."""
    script = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from vllm_steer.server.capture_store import CaptureStore, StoreLimits\n"
        "store = CaptureStore(StoreLimits(0, 100, 60), 'killed'); store.put(b'x', 'safetensors')\n"
        "print('written', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, tempfile.gettempdir()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        living = store_of_name("first")
        living.put(b"x", "safetensors")
        assert len(list(shared_tempdir_path("killed").glob("*.safetensors"))) == 1
        process.kill()
    store_of_name("second").put(b"x", "safetensors")
    assert not shared_tempdir_path("killed").exists()
    assert shared_tempdir_path("first").exists()


async def test_cancelled_writes_are_deleted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches stored captures whose id no client received, because the request was cancelled."""
    store = store_of_name(name)
    entered, go_on = threading.Event(), threading.Event()
    write = CaptureStore._write

    def slow(self: CaptureStore, path: Path, data: bytes, *whose: Any) -> None:
        entered.set()
        go_on.wait(10)
        write(self, path, data, *whose)

    monkeypatch.setattr(CaptureStore, "_write", slow)
    keeping = asyncio.create_task(store.put_async(b"x", "safetensors"))
    await asyncio.to_thread(entered.wait, 10)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    go_on.set()
    for _ in range(100):
        await asyncio.sleep(0.02)
        if shared_tempdir_path(name).exists() and not len(store):
            break
    assert len(store) == 0


async def test_captures_require_authentication() -> None:
    """Catches captures returned to, or deleted by, clients without a key of the server."""
    app = make_capturing_app([{"memory": done(captured())}])
    middleware = app.user_middleware.pop()

    class Authentication:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            known = any(header == (b"authorization", b"Bearer key") for header in scope["headers"])
            await (self.app if known else JSONResponse({}, 401))(scope, receive, send)

    app.add_middleware(Authentication)
    app.user_middleware.insert(0, middleware)  # outermost, where vLLM puts --middleware
    handle = capture_store_of(app).put(b"rows", "safetensors")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for method in ("GET", "DELETE"):
            assert (await client.request(method, f"/v1/captures/{handle}")).status_code == 401
        response = await client.get(f"/v1/captures/{handle}", headers={"authorization": "Bearer key"})
    assert response.content == b"rows"

# SPDX-License-Identifier: Apache-2.0
"""The storage of a registry in a database: a full disk, and queries that get no answer."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.registry.modules import content, registry
from vllm_steer.registry.database import DatabaseStore
from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.registry.registry import SteeringRegistry

EDITS = content(3)["edits"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


def connect(path: Path) -> SteeringRegistry:
    return registry(DatabaseStore(f"sqlite:///{path}"))


@pytest.fixture
def steered(path: Path) -> SteeringRegistry:
    one = connect(path)
    one.register("calm", **content(100))
    one.set(modules=["calm"], edits=EDITS)
    return one


@contextmanager
def full_disk() -> Iterator[list[str]]:
    """Let no file grow, neither the database nor a rollback journal on the disk. Yields the modes of the journal."""
    modes: list[str] = []

    def execute(cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith(("INSERT", "UPDATE", "DELETE")):
            return
        pages = cursor.execute("PRAGMA page_count").fetchone()[0]
        cursor.execute(f"PRAGMA max_page_count = {pages}")
        modes.append(cursor.execute("PRAGMA journal_mode").fetchone()[0])
        if modes[-1] != "memory":
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    sa.event.listen(sa.Engine, "do_execute", execute)
    try:
        yield modes
    finally:
        sa.event.remove(sa.Engine, "do_execute", execute)


def test_clears_and_deletes_on_a_full_disk(path: Path, steered: SteeringRegistry) -> None:
    """Catches global steering that stays in force because the disk has no space for the change that clears it.

    Changes that add something fail, and change nothing.
    """
    other = connect(path)
    with full_disk():
        for add in (lambda: steered.register("new", **content(200)), lambda: steered.set(modules=[("calm", 0.5)])):
            with pytest.raises(RegistryUnavailableError, match="full"):
                add()
        assert other.status().modules and other.status().digest
        steered.clear()
        for each in (steered, other, connect(path)):
            assert each.status().digest is None
        other.delete("calm")
        assert not steered.list().data


def test_a_disk_with_space_again_is_used(path: Path, steered: SteeringRegistry) -> None:
    """Catches a journal in memory that outlives the full disk, and content without a module that is never removed."""
    with full_disk() as modes:
        steered.clear()
        steered.delete("calm")
        assert modes == ["delete", "memory"] * 2
    steered.register("new", **content(200))
    with full_disk() as modes, pytest.raises(RegistryUnavailableError):
        steered.register("newer", **content(300))
    assert modes == ["delete"]
    with sqlite3.connect(path) as stored:
        assert stored.execute("SELECT count(*) FROM vllm_steer_objects").fetchone() == (1,)


@pytest.mark.parametrize("hung", ["refresh", "change"])
def test_a_query_without_an_answer_does_not_keep_steering_on(
    hung: str, path: Path, steered: SteeringRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a change that clears global steering and waits for a query that another thread has sent.

    The answer of that query, which comes later, is not taken for the present state.
    """
    store = steered._store
    assert isinstance(store, DatabaseStore)
    asked, answered = threading.Event(), threading.Event()
    transact = store._transact

    def wait(*args: Any, **kwargs: Any) -> Any:
        if not threading.current_thread().name.startswith("hung"):
            return transact(*args, **kwargs)
        found = transact(*args, **kwargs) if hung == "refresh" else None
        asked.set()
        assert answered.wait(60)
        return found or transact(*args, **kwargs)

    monkeypatch.setattr(store, "_transact", wait)
    with ThreadPoolExecutor(1, "hung") as pool:
        late = pool.submit(store.refresh if hung == "refresh" else lambda: steered.register("late", **content(7)))
        assert asked.wait(60)
        clearing = threading.Thread(target=steered.clear, daemon=True)
        clearing.start()
        clearing.join(30)
        cleared = not clearing.is_alive()
        answered.set()
        late.result()
    assert cleared
    assert steered.status().digest is None and connect(path).status().digest is None

# SPDX-License-Identifier: Apache-2.0
"""Tests of connections to PostgreSQL that are lost, and of transactions that wait for each other."""

from __future__ import annotations

import pytest

from tests.postgresql import PostgresServer
from tests.registry.backends import PostgresBackend
from tests.registry.modules import content, registry, vector
from vllm_steer.registry import database
from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.registry.index import RegistryLimits
from vllm_steer.registry.module import parse_module
from vllm_steer.registry.snapshot import Snapshot


@pytest.fixture
def backend(postgres_server: PostgresServer) -> PostgresBackend:
    return PostgresBackend(postgres_server)


def end_connections(backend: PostgresBackend) -> None:
    """End all connections, as a restart of the database or of a proxy does."""
    backend.server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{backend.name}'")


def test_idle_connections_are_replaced(backend: PostgresBackend) -> None:
    """Catches HTTP 503 for the first requests after the database was restarted."""
    one = registry(backend.open())
    end_connections(backend)
    assert one.list().epoch == 0
    end_connections(backend)
    assert one.register("calm", **content()).epoch == 1


def test_a_connection_lost_in_a_change_changes_nothing(backend: PostgresBackend) -> None:
    """Catches a change that is made twice or reported as stored, and a store that is unusable afterwards."""
    store, calls = backend.open(), 0

    def update(old: Snapshot) -> Snapshot:
        nonlocal calls
        calls += 1
        end_connections(backend)
        return registry_change(old)

    def registry_change(old: Snapshot) -> Snapshot:
        return old.with_steering((), parse_module({"base": {"post_block": {1: vector(1)}}}), RegistryLimits())

    with pytest.raises(RegistryUnavailableError):
        store.change(update)
    assert calls == 1
    assert store.refresh().epoch == registry(backend.open()).list().epoch == 0
    assert store.change(registry_change).epoch == 1


def test_an_unreachable_database_is_an_error(postgres_server: PostgresServer) -> None:
    """Catches a server that goes on with an old state while it cannot know the newest, and one that never recovers."""
    backend = PostgresBackend(postgres_server)
    one = registry(backend.open())
    one.register("calm", **content())
    postgres_server.stop()
    try:
        for read in (one.list, lambda: one.compose({})):
            with pytest.raises(RegistryUnavailableError, match="connection to server"):
                read()
    finally:
        postgres_server.start()
    postgres_server.execute("SELECT 1")  # waits until it has recovered
    assert one.get("calm").versions == registry(backend.open()).get("calm").versions
    assert one.register("new", **content(100)).epoch == 2


def test_a_writer_does_not_wait_forever(backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a change that waits without limit for a process that holds the lock."""
    monkeypatch.setattr(database, "_WRITER_SETTINGS", ("SET LOCAL lock_timeout = '100ms'",))
    one, other = registry(backend.open()), backend.open()

    def update(old: Snapshot) -> Snapshot:
        with pytest.raises(RegistryUnavailableError, match="another process is changing it; try again"):
            one.register("calm", **content())
        assert one.list().epoch == 0  # readers do not wait
        return old

    other.change(update)
    assert one.register("calm", **content()).epoch == 1


def test_a_database_that_accepts_and_does_not_answer(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches requests that wait without limit, and requests behind them that each wait as long."""
    monkeypatch.setattr(database, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(database, "_SILENT_SECONDS", 1000.0)
    store = PostgresBackend(postgres_server).open()
    runs: list[str] = []
    run = store._run
    monkeypatch.setattr(store, "_run", lambda body, begin: runs.append(begin) or run(body, begin))
    with monkeypatch.context() as silent:
        # A query that takes for ever is what a database looks like that has stopped behind an open connection.
        silent.setattr(database, "_read_revision", lambda connection: connection.exec_driver_sql("SELECT pg_sleep(60)"))
        assert store.is_stale()  # `refresh` reports the error
    for _ in range(3):
        with pytest.raises(RegistryUnavailableError, match="does not answer"):
            store.refresh()
    assert runs == [""]  # one query, of those that read
    store._silent_until = 0.0
    assert store.refresh().epoch == 0

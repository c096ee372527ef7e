# SPDX-License-Identifier: Apache-2.0
"""Storage of a registry in a database that several servers share: SQLite on one host, PostgreSQL on many.

One row of ``vllm_steer_registry`` is the state without content. ``vllm_steer_objects`` contains the content: one
safetensors file per module, by digest. A change is one transaction: it locks the row, writes content and state, and
removes unused content. The database rolls the transaction back if its process dies. Each change writes a new random
revision, so one small query detects a newer state, also after the database was restored from a backup.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from vllm_steer.registry.database_engine import (
    ANSWER_SECONDS,
    LOCK_SECONDS,
    MODE,
    WRITES,
    WRITES_IN_PLACE,
    create_engine,
    is_disk_full,
)
from vllm_steer.registry.errors import FIELD, RegistryUnavailableError
from vllm_steer.registry.index import RegistryIndex, decode_index, encode_index
from vllm_steer.registry.location import show_location, split_url
from vllm_steer.registry.module_files import write_module
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.registry.storage import RegistryStore

T = TypeVar("T")

_METADATA = sa.MetaData()
STATE = sa.Table(
    "vllm_steer_registry",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("revision", sa.String(32), nullable=False),
    sa.Column("state", sa.LargeBinary, nullable=False),
)
OBJECTS = sa.Table(
    "vllm_steer_objects",
    _METADATA,
    sa.Column("digest", sa.String(80), primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
)
_ROW = STATE.c.id == 1
_CREATE_LOCK = 7_310_589_204_116_273_477
"""Key of PostgreSQL's advisory lock for the creation of the tables, which is not atomic there."""
_SILENT_SECONDS = 1.0
"""How long a database that did not answer is not asked again."""
_WRITER_SETTINGS = (
    "SET LOCAL synchronous_commit = on",  # an acknowledged change survives a crash of the database
    f"SET LOCAL lock_timeout = '{int(LOCK_SECONDS)}s'",
    f"SET LOCAL idle_in_transaction_session_timeout = '{int(3 * LOCK_SECONDS)}s'",  # of a writer that hangs
)


class DatabaseStore(RegistryStore):
    """Registry storage in a database."""

    is_remote = True

    def __init__(self, url: str) -> None:
        """Connect to the database, and create the tables if they do not exist.

        Raises:
            SteeringError: The URL is invalid, the database cannot be used, or its state is damaged.
        """
        super().__init__()
        parts = split_url(url, FIELD)
        self._shown = show_location(url)
        self._known = ("", self._snapshot)
        """Revision and snapshot that were read last. The lock is held while they are replaced, not during queries, so
        that a query that waits does not keep others from clearing global steering."""
        self._silent_until = 0.0
        self._is_postgresql = parts.scheme == "postgresql"
        self._engine, self._check_file = create_engine(parts)
        with self._report_errors():
            if not self._transact(_has_state):
                self._transact(self._create_tables, writes=WRITES)
        self.refresh()

    def is_stale(self) -> bool:
        """Return whether there is a newer state. Queries the database, so it must not run in an event loop."""
        try:
            with self._report_errors():
                return self._transact(_read_revision) != self._known[0]
        except RegistryUnavailableError:
            return True  # `refresh` reports the error

    def refresh(self) -> Snapshot:
        """Return the newest snapshot; raises ``RegistryUnavailableError``."""
        before = self._known
        with self._report_errors():
            return self._adopt(before, self._transact(self._load))

    def change(self, update: Callable[[Snapshot], Snapshot]) -> Snapshot:
        """Apply ``update`` to the newest snapshot, as `RegistryStore.change` specifies.

        Raises:
            RegistryFullError: The index would exceed its size limit.
            RegistryUnavailableError: The database cannot be read or written. If the connection is lost during the
                commit, the change may have been stored.
        """
        before = self._known
        updating = removes = False

        def write(connection: sa.Connection, *, keeps_unused: bool = False) -> tuple[str, Snapshot]:
            nonlocal updating, removes
            revision, old = self._load(connection, lock=True)
            updating = True
            new = update(old)
            if new is old:
                return revision, old
            size = connection.execute(sa.select(sa.func.length(STATE.c.state)).where(_ROW)).scalar_one()
            state = encode_index(new.index, size)
            removes = len(state) < size
            return self._store(connection, state, old, new, keeps_unused=keeps_unused), new

        with self._report_errors():
            try:
                changed = self._transact(write, writes=WRITES, may_retry=lambda: not updating)
            except OperationalError as error:
                if not (removes and is_disk_full(error)):
                    raise
                changed = self._transact(partial(write, keeps_unused=True), writes=WRITES_IN_PLACE)
            return self._adopt(before, changed)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _adopt(self, before: tuple[str, Snapshot], found: tuple[str, Snapshot]) -> Snapshot:
        """Return the snapshot that a transaction has found, and remember it if that began with the present one."""
        with self.lock:
            if self._known is before:  # otherwise what another thread has found may be newer
                self._known = found
                self._snapshot = found[1]
        return found[1]

    def _create_tables(self, connection: sa.Connection) -> None:
        if self._is_postgresql:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATE_LOCK)))
        _METADATA.create_all(connection)
        if connection.execute(sa.select(STATE.c.id).where(_ROW)).one_or_none() is None:
            state = msgspec.json.encode(RegistryIndex())
            connection.execute(sa.insert(STATE).values(id=1, revision=secrets.token_hex(16), state=state))

    def _load(self, connection: sa.Connection, lock: bool = False) -> tuple[str, Snapshot]:
        """Return the newest revision and its snapshot. Content that is already in memory is not read again."""
        query = sa.select(STATE.c.revision, STATE.c.state).where(_ROW)
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        if row is None:
            raise RegistryUnavailableError(FIELD, f"the table {STATE.name} has lost its row", self._shown)
        known = self._known
        if row.revision == known[0]:
            return known

        def read(digest: str) -> bytes:
            data = connection.execute(sa.select(OBJECTS.c.content).where(OBJECTS.c.digest == digest)).scalar()
            if data is None:
                raise FileNotFoundError
            return bytes(data)

        index = decode_index(row.state)
        snapshot, _ = self.read_contents(index, read, "its content in the registry's database")
        return row.revision, snapshot

    def _store(
        self, connection: sa.Connection, state: bytes, old: Snapshot, new: Snapshot, *, keeps_unused: bool
    ) -> str:
        """Write a snapshot and return its revision; ``keeps_unused`` leaves content to the next change to remove."""
        needed = new.index.digests()
        added = new.contents.keys() - old.contents.keys()
        stored = set(connection.execute(sa.select(OBJECTS.c.digest)).scalars())
        unused = [{"old": digest} for digest in (stored - needed) | (stored & added)]  # damaged content is replaced
        if unused and not keeps_unused:
            connection.execute(sa.delete(OBJECTS).where(OBJECTS.c.digest == sa.bindparam("old")), unused)
        for digest in added:
            connection.execute(sa.insert(OBJECTS).values(digest=digest, content=write_module(new.contents[digest])))
        revision = secrets.token_hex(16)
        connection.execute(sa.update(STATE).where(_ROW).values(revision=revision, state=state))
        return revision

    def _transact(
        self, body: Callable[[sa.Connection], T], writes: str = "", may_retry: Callable[[], bool] = lambda: True
    ) -> T:
        """Run ``body`` in a transaction. If the connection was lost while it was idle, run it again on a new one."""
        if time.monotonic() < self._silent_until:  # requests that arrive meanwhile do not wait as well
            raise RegistryUnavailableError(FIELD, "its database does not answer; try again", self._shown)
        try:
            return self._run(body, writes)
        except DBAPIError as error:
            if getattr(error.orig, "no_answer", False):
                self._silent_until = time.monotonic() + _SILENT_SECONDS
                raise
            if not error.connection_invalidated or not may_retry():
                raise
        return self._run(body, writes)

    def _run(self, body: Callable[[sa.Connection], T], writes: str) -> T:
        if self._check_file is not None:
            self._check_file()
        options: dict[str, Any] = {MODE: writes}
        if self._is_postgresql:
            options["isolation_level"] = "READ COMMITTED" if writes else "REPEATABLE READ"
        with self._engine.connect() as pooled:
            connection = pooled.execution_options(**options)
            with connection.begin():
                driver: Any = connection.connection.driver_connection
                if self._is_postgresql:
                    driver.answer_seconds = ANSWER_SECONDS + (LOCK_SECONDS if writes else 0)
                if writes and self._is_postgresql:
                    for setting in _WRITER_SETTINGS:
                        connection.exec_driver_sql(setting)
                result = body(connection)
            if writes == WRITES_IN_PLACE:
                connection.invalidate()  # the next one has a journal on the disk again
            return result

    @contextmanager
    def _report_errors(self) -> Iterator[None]:
        """Turn the library's errors into a ``RegistryUnavailableError`` with the database's reason."""
        try:
            yield
        except SQLAlchemyError as error:
            original: Any = getattr(error, "orig", None) or error
            reason = next(iter(str(original).strip().splitlines()), type(original).__name__)
            problem, place = "its database cannot be used", f"{self._shown}: {reason}"
            if getattr(original, "sqlstate", None) == "55P03" or reason == "database is locked":
                problem, place = "another process is changing it; try again", self._shown
            raise RegistryUnavailableError(FIELD, problem, place) from None


def _has_state(connection: sa.Connection) -> bool:
    return sa.inspect(connection).has_table(STATE.name) and _read_revision(connection) is not None


def _read_revision(connection: sa.Connection) -> str | None:
    return connection.execute(sa.select(STATE.c.revision).where(_ROW)).scalar_one_or_none()

# SPDX-License-Identifier: Apache-2.0
"""Connections to the database of a registry."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from vllm_steer.errors import SteeringError
from vllm_steer.fs.dirfd import identity
from vllm_steer.fs.mounts import is_networked, mount_of
from vllm_steer.registry.errors import FIELD, RegistryUnavailableError
from vllm_steer.registry.location import sqlite_path

ANSWER_SECONDS = 5.0
"""How long a database may take to answer a query. A change may also wait for other processes."""
LOCK_SECONDS = 10.0
"""How long a change waits for another process to finish its own."""
CONNECT_SECONDS = 5
MODE, WRITES, WRITES_IN_PLACE = "steering_mode", "writes", "writes in place"
"""Execution option of connections, and its values for transactions that change the registry. The second is for a SQLite
file whose disk is full: the transaction can be rolled back from memory only, so it must not write much."""
_SQLITE_DISK_ERRORS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""Codes of a disk without space for a file's new pages, within a quota, or for the rollback journal."""


def create_engine(parts: SplitResult) -> tuple[sa.Engine, Callable[[], None] | None]:
    """Return SQLAlchemy's engine for a database URL, and a check to run before each transaction.

    Raises:
        SteeringError: The file of a SQLite database is a symbolic link, can be written by others, or is on a network
            file system.
        RegistryUnavailableError: The file of a SQLite database cannot be created.
    """
    if parts.scheme == "sqlite":
        path = sqlite_path(parts).absolute()
        return _sqlite(path), _file_check(path)
    return _postgresql(parts), None


def _postgresql(parts: SplitResult) -> sa.Engine:
    url = sa.URL.create(
        "postgresql+psycopg",
        username=None if parts.username is None else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
        host=parts.hostname,
        port=parts.port,
        database=unquote(parts.path.removeprefix("/")) or None,
        query={key: values[0] if len(values) == 1 else tuple(values) for key, values in parse_qs(parts.query).items()},
    )
    arguments = {
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": int(LOCK_SECONDS * 1000),
        "application_name": "vllm-steer",
    }
    given = {key: value for key, value in arguments.items() if key not in url.query}
    # Without prepared statements, which poolers such as PgBouncer may not support.
    engine = sa.create_engine(url, hide_parameters=True, connect_args={**given, "prepare_threshold": None})
    sa.event.listen(engine, "do_connect", lambda _, record, args, options: _connect(*args, **options))
    return engine


def _connect(*args: Any, **options: Any) -> Any:
    """Return a psycopg connection that is closed if the database does not answer in time, which libpq waits for."""
    import psycopg  # optional

    class Connection(psycopg.Connection[Any]):
        answer_seconds = ANSWER_SECONDS

        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            try:
                return super().wait(_until(gen, time.monotonic() + self.answer_seconds), interval)
            except TimeoutError:
                self.close()
                raise NoAnswerError(f"no answer within {self.answer_seconds:g} s") from None

    class NoAnswerError(psycopg.OperationalError):
        no_answer = True

    try:
        return Connection.connect(*args, **options)
    except psycopg.errors.ConnectionTimeout as error:
        raise NoAnswerError(str(error)) from None


def _until(gen: Any, deadline: float) -> Any:
    """Run a generator of psycopg, which is resumed several times per second; raise TimeoutError after ``deadline``."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            wanted = gen.send(ready)
            if time.monotonic() > deadline:
                raise TimeoutError
    except StopIteration as end:
        return end.value


def _sqlite(path: Path) -> sa.Engine:
    try:
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        for each in (path, path.parent):
            _check_private(each)
    except OSError as error:
        raise _unusable(path, error) from None
    mount = mount_of(path)
    if mount is not None and is_networked(mount.kind):
        raise SteeringError(
            FIELD, f"{path} is on {mount.kind}: SQLite needs a file system of this host; use PostgreSQL instead"
        )
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)), hide_parameters=True, connect_args={"timeout": LOCK_SECONDS}
    )
    sa.event.listen(engine, "connect", _configure_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def is_disk_full(error: OperationalError) -> bool:
    """Return whether SQLite had no space to write."""
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _SQLITE_DISK_ERRORS


def _unusable(path: Path, error: OSError) -> RegistryUnavailableError:
    return RegistryUnavailableError(FIELD, f"its file cannot be used: {error.strerror or error}", str(path))


def _check_private(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode):  # others can replace files in a folder without the sticky bit
        private = not status.st_mode & 0o022 or bool(status.st_mode & stat.S_ISVTX)
    else:
        private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    if not private:
        raise SteeringError(FIELD, f"others can write to {path}; use a file of your own with mode 0600")


def _file_check(path: Path) -> Callable[[], None]:
    opened = identity(path.lstat())

    def check() -> None:
        try:
            found = identity(path.lstat())
        except OSError as error:
            raise _unusable(path, error) from None
        if found != opened:
            raise RegistryUnavailableError(FIELD, "its file was replaced; restart the server", str(path))

    return check


def _configure_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # otherwise the driver begins transactions by itself, and too late
    connection.execute("PRAGMA synchronous = EXTRA")  # an acknowledged change survives a power failure


def _begin_sqlite(connection: sa.Connection) -> None:
    mode = connection.get_execution_options().get(MODE)
    if not mode:
        connection.exec_driver_sql("BEGIN")
        return
    if mode == WRITES_IN_PLACE:
        connection.exec_driver_sql("PRAGMA journal_mode = MEMORY")
    # A writer takes its lock before it reads. SQLite's own wait sleeps up to 0.1 s between attempts, so that a process
    # that makes changes without a pause could keep the others out.
    deadline = time.monotonic() + LOCK_SECONDS
    connection.exec_driver_sql("PRAGMA busy_timeout = 0")
    while True:
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            break
        except OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.001, 0.01))
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(LOCK_SECONDS * 1000)}")

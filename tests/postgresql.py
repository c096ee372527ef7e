# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL server for tests, from the binaries of Debian's package ``postgresql``."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

USER, PASSWORD = "steerer", "open-sesame-4711"


def find_binaries() -> Path | None:
    """Return the folder with ``initdb`` and ``postgres``, or None."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


class PostgresServer:
    """A server in a temporary folder. It listens on a socket in that folder only, and requires the password."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="steer-pg-", dir="/tmp"))  # the path of a socket must be short
        # PostgreSQL refuses to run as root.
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            entry = pwd.getpwnam("nobody")
            self._user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)
        self.folder.chmod(0o755)
        word_file = self.folder / "word"
        word_file.write_text(PASSWORD)
        word_file.chmod(0o644)
        command = [binaries / "initdb", "--no-sync", "-A", "scram-sha-256", "-U", USER, f"--pwfile={word_file}"]
        subprocess.run(
            [*command, "-D", self.folder / "data"], check=True, capture_output=True, cwd=self.folder, **self._user
        )
        self._names = itertools.count()
        self.start()

    def start(self) -> None:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "shared_buffers": "16MB",
            "fsync": "off",  # the machine does not crash
        }
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self.folder / "data", *options],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                **self._user,
            )
        while not (self.folder / ".s.PGSQL.5432").exists():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server at once, as a crash does."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()
        (self.folder / ".s.PGSQL.5432").unlink(missing_ok=True)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run a statement and return its rows."""
        import psycopg

        parameters = {"host": str(self.folder), "user": USER, "password": PASSWORD, "dbname": database}
        for attempt in itertools.count():
            try:
                with psycopg.connect(autocommit=True, **parameters) as connection:  # type: ignore[arg-type]
                    cursor = connection.execute(statement)  # type: ignore[call-overload]
                    return [] if cursor.description is None else cursor.fetchall()
            except psycopg.OperationalError:
                if attempt == 100:
                    raise
                time.sleep(0.1)  # it is starting
        raise AssertionError

    def new_database(self) -> str:
        """Create a database and return its URL."""
        name = f"registry{next(self._names)}"
        self.execute(f"CREATE DATABASE {name}")
        return f"postgresql://{USER}:{PASSWORD}@/{name}?host={self.folder}"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("needs PostgreSQL; install it with `apt-get install postgresql`")
    server = PostgresServer(binaries)
    yield server
    server.close()

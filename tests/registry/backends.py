# SPDX-License-Identifier: Apache-2.0
"""Storage of registries as tests see it: they read and damage what is stored, past the code under test."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import psycopg
import pytest
import sqlalchemy as sa

from tests.postgresql import PostgresServer
from vllm_steer.registry import database, directory
from vllm_steer.registry.database import OBJECTS, STATE
from vllm_steer.registry.storage import RegistryStore, open_store


class Backend(Protocol):
    """One kind of storage."""

    location: str
    """Value of ``--steering-registry``."""

    def open(self) -> RegistryStore:
        """Return a store, as another process would open it."""
        return open_store(self.location)

    def digests(self) -> set[str]:
        """Return the digests of the stored content."""
        ...

    def content(self, digest: str) -> bytes: ...

    def damage(self, digest: str, data: bytes | None) -> None:
        """Replace the stored content, or remove it if ``data`` is None."""

    def index(self) -> bytes: ...

    def damage_index(self, data: bytes) -> None: ...

    def leftovers(self) -> list[str]:
        """Return what a killed writer has left behind."""
        ...

    def fill_disk(self, monkeypatch: pytest.MonkeyPatch, nth: int) -> str:
        """Let the first or second write of a change fail, and return a part of the reason."""
        ...


class FolderBackend(Backend):
    def __init__(self, root: Path) -> None:
        self.root, self.location = root, str(root)

    def _file(self, digest: str) -> Path:
        return self.root / "objects" / f"{digest.removeprefix('sha256:')}.safetensors"

    def digests(self) -> set[str]:
        return {f"sha256:{path.stem}" for path in (self.root / "objects").iterdir()}

    def content(self, digest: str) -> bytes:
        return self._file(digest).read_bytes()

    def damage(self, digest: str, data: bytes | None) -> None:
        self._file(digest).unlink() if data is None else self._file(digest).write_bytes(data)

    def index(self) -> bytes:
        return (self.root / "index.json").read_bytes()

    def damage_index(self, data: bytes) -> None:
        (self.root / "index.json").write_bytes(data)

    def leftovers(self) -> list[str]:
        return [path.name for path in self.root.rglob("*") if path.name.startswith(".tmp-")]

    def fill_disk(self, monkeypatch: pytest.MonkeyPatch, nth: int) -> str:
        calls = 0

        def write(fd: int, data: bytes) -> int:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise OSError(28, "No space left on device")
            return real(fd, data)

        real = os.write
        monkeypatch.setattr(directory.os, "write", write)
        return "No space left"


class _DatabaseBackend(Backend):
    _url: sa.URL

    def _execute(self, statement: sa.Executable) -> list[tuple[object, ...]]:
        engine = sa.create_engine(self._url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            found = connection.execute(statement)
            return [tuple(row) for row in found] if found.returns_rows else []

    def digests(self) -> set[str]:
        return {str(digest) for (digest,) in self._execute(sa.select(OBJECTS.c.digest))}

    def content(self, digest: str) -> bytes:
        ((data,),) = self._execute(sa.select(OBJECTS.c.content).where(OBJECTS.c.digest == digest))
        assert isinstance(data, bytes)
        return data

    def damage(self, digest: str, data: bytes | None) -> None:
        which = OBJECTS.c.digest == digest
        self._execute(
            sa.delete(OBJECTS).where(which) if data is None else sa.update(OBJECTS).where(which).values(content=data)
        )

    def index(self) -> bytes:
        ((data,),) = self._execute(sa.select(STATE.c.state))
        assert isinstance(data, bytes)
        return data

    def damage_index(self, data: bytes) -> None:
        self._execute(sa.update(STATE).values(state=data, revision="damaged"))

    def leftovers(self) -> list[str]:
        return []

    def fill_disk(self, monkeypatch: pytest.MonkeyPatch, nth: int) -> str:
        def fail(*_: object) -> None:
            raise sa.exc.OperationalError("", {}, psycopg.OperationalError("No space left on device"))

        if nth == 1:
            monkeypatch.setattr(database, "write_module", fail)  # the content
        else:
            monkeypatch.setattr(database, "secrets", SimpleNamespace(token_hex=fail))  # the state, after the content
        return "No space left"


class SqliteBackend(_DatabaseBackend):
    def __init__(self, path: Path) -> None:
        self.path, self.location = path, f"sqlite:///{path}"
        self._url = sa.make_url(self.location)


class PostgresBackend(_DatabaseBackend):
    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.location = server.new_database()
        self._url = sa.make_url(self.location).set(drivername="postgresql+psycopg")

    @property
    def name(self) -> str:
        return str(self._url.database)

# SPDX-License-Identifier: Apache-2.0
"""Tests of database URLs and of the file systems that can hold a registry."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.registry.modules import content, registry
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import RegistryOptions
from vllm_steer.fs import mounts
from vllm_steer.registry import location as location_module
from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.registry.location import parse_location, show_location
from vllm_steer.registry.storage import open_store

SECRET = "s3cr3t"
WRONG_URLS = [
    f"mysql://u:{SECRET}@host/db",
    f"postgres://u:{SECRET}@host/db",
    f"postgresql:/u:{SECRET}@host/db",
    f"postgresql:u:{SECRET}@host/db",
    f"postgresql+psycopg2://u:{SECRET}@host/db",
    f"postgresql://u:pa@{SECRET}@host/db",
    f"postgresql://u:pa/{SECRET}@host/db",
    f"postgresql://u:pa?{SECRET}@host/db",
    f"postgresql://u:pa#{SECRET}@host/db",
    f"postgresql://u:1/{SECRET}",
    f"postgresql://u:{SECRET}",
    "sqlite://",
    "sqlite:///",
    "sqlite:///:memory:",
    "sqlite://host/path",
    "sqlite:///path?mode=ro",
    "sqlite:path",
]


@pytest.mark.parametrize("url", WRONG_URLS[:9] + WRONG_URLS[10:])
def test_rejects_wrong_urls_without_showing_them(url: str) -> None:
    """Catches a URL that is taken for a folder or for another database, and a message that contains the password."""
    with pytest.raises(SteeringError) as caught:
        parse_location(url, "--steering-registry")
    assert caught.value.field == "--steering-registry"
    assert SECRET not in str(caught.value)
    assert SECRET not in show_location(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://u:{SECRET}@host:5432/db", "postgresql://***@host:5432/db"),
        (f"postgresql://host/db?user=u&password={SECRET}", "postgresql://***@host/db"),
        (f"postgresql://u%40x:%2F{SECRET}@[::1]/db", "postgresql://***@[::1]/db"),
        ("postgresql://host/db", "postgresql://host/db"),
        ("sqlite:////data/r.db", "sqlite:////data/r.db"),
        ("/data/registry", "/data/registry"),
    ],
)
def test_hides_credentials(url: str, shown: str) -> None:
    """Catches a password in a log line, in an error, or in the options' representation."""
    assert show_location(parse_location(url, "x")) == shown
    assert SECRET not in repr(RegistryOptions.of(url, None))
    assert RegistryOptions.of(url, None).folder == url


def test_makes_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches API servers that use other files because they run in another folder."""
    monkeypatch.chdir(tmp_path)
    assert parse_location("here", "x") == str(tmp_path / "here")
    assert parse_location("sqlite:///here.db", "x") == f"sqlite:///{tmp_path}/here.db"
    assert parse_location("sqlite:////here.db", "x") == "sqlite:////here.db"


def test_expands_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a registry in a new folder named ``~``, which a start in another folder does not find."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_location("~/here", "x") == str(tmp_path / "here")
    assert parse_location("sqlite:///~/here.db", "x") == f"sqlite:///{tmp_path}/here.db"
    with pytest.raises(SteeringError, match=r"^x: ~no-such-user/here: "):
        parse_location("~no-such-user/here", "x")


def test_paths_of_sqlite_databases(tmp_path: Path) -> None:
    """Catches a home folder such as ``/home/user@example.org`` refused as a password, and advice to encode a path."""
    folder = tmp_path / "user@example.org"
    folder.mkdir(mode=0o700)
    url = f"sqlite:///{folder}/100%25.db"
    assert parse_location(url, "x") == show_location(url) == url
    open_store(url)
    assert [path.name for path in folder.iterdir()] == ["100%25.db"]
    for name in ("a#b.db", "a?b.db", "a#"):
        with pytest.raises(SteeringError, match=r"^x: the path of a SQLite database cannot contain '\?' or '#'"):
            parse_location(f"sqlite:///{tmp_path}/{name}", "x")


def test_refuses_an_empty_location() -> None:
    """Catches a registry in the present folder because a variable of a script is empty."""
    with pytest.raises(SteeringError, match=r"^x: is empty; name a folder"):
        parse_location("", "x")


@pytest.mark.parametrize(("url", "package"), [("sqlite:///a", "sqlalchemy"), ("postgresql://h/d", "psycopg")])
def test_names_a_missing_package(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError in every API server process instead of one message at start."""
    real = location_module.find_spec
    monkeypatch.setattr(location_module, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(SteeringError, match=rf"need the package {package}; run `pip install .*database"):
        parse_location(url, "x")


def test_a_wrong_password_is_not_shown(postgres_server: object) -> None:
    """Catches the password in the error of a start that the database rejects."""
    from tests.registry.backends import PostgresBackend

    url = PostgresBackend(postgres_server).location.replace("open-sesame-4711", SECRET)  # type: ignore[arg-type]
    with pytest.raises(RegistryUnavailableError, match="password authentication failed") as caught:
        open_store(url)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def mountinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, options: str = "rw") -> None:
    """Let ``folder`` be a mount of that type, with the escapes of proc_pid_mountinfo(5)."""
    point = str(folder).replace(" ", "\\040")
    lines = [
        "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw",
        f"2 1 0:50 / {point} rw,relatime shared:2 master:1 - {kind} server:/export {options}",
        f"3 1 0:51 / {point}-other rw - tmpfs tmpfs rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(mounts, "MOUNTINFO", tmp_path / "mountinfo")


@pytest.mark.parametrize(
    ("kind", "options", "refusal"),
    [
        ("fuse.sshfs", "rw", "no locks that hold on all hosts"),
        ("fuse.s3fs", "rw", "neither locks nor atomic renames"),
        ("cifs", "rw", "cannot replace a file"),
        ("nfs", "rw,vers=3,nolock", "mount option nolock"),
        ("nfs4", "rw,local_lock=flock", "mount option local_lock=flock"),
        ("lustre", "rw,localflock", "mount option localflock"),
    ],
)
def test_refuses_file_systems_without_locks(
    kind: str, options: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches servers of two hosts that overwrite each other's changes because locks hold on one host only."""
    folder = tmp_path / "a mount"
    folder.mkdir()
    mountinfo(tmp_path, monkeypatch, folder, kind, options)
    with pytest.raises(SteeringError, match=refusal):
        open_store(str(folder / "registry"))
    registry(open_store(str(tmp_path / "local"))).register("calm", **content())  # on the mount above


def test_warns_of_network_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a registry on NFS without a word, whose changes reach other hosts late, and SQLite on NFS."""
    folder = tmp_path / "mount"
    folder.mkdir()
    mountinfo(tmp_path, monkeypatch, folder, "nfs4", "rw,vers=4.2,local_lock=none")
    caplog.set_level(logging.WARNING)
    logging.getLogger("vllm").propagate = True
    try:
        open_store(str(folder / "registry"))
        assert "is on nfs4: other hosts can see changes some seconds late" in caplog.text
        caplog.clear()
        open_store(str(tmp_path / "local"))
        assert caplog.text == ""
    finally:
        logging.getLogger("vllm").propagate = False
    with pytest.raises(SteeringError, match="SQLite needs a file system of this host"):
        open_store(f"sqlite:///{folder}/r.db")


def test_mounts_with_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a start that fails because of a mount elsewhere, whose name is not UTF-8 or contains a line separator."""
    names = ["/media/caf\udce9", "/media/a\u2028b", str(tmp_path)]
    lines = [f"{i} 1 0:{i} / {name} rw - {'nfs' if i == 2 else 'ext4'} x rw" for i, name in enumerate(names)]
    (tmp_path / "mountinfo").write_bytes(os.fsencode("\n".join(lines) + "\n"))
    monkeypatch.setattr(mounts, "MOUNTINFO", tmp_path / "mountinfo")
    found = [mounts.mount_of(path) for path in (tmp_path / "here", Path(names[0]), Path(names[1]))]
    assert [mount and mount.kind for mount in found] == ["nfs", "ext4", "ext4"]


def test_reads_this_systems_mounts() -> None:
    """Catches a parser that finds no mount, with which no file system would be refused."""
    mount = mounts.mount_of(Path("/proc/self"))
    assert mount is not None and mount.kind == "proc"
    root = mounts.mount_of(Path("/"))
    assert root is not None and root.kind != "proc"


def test_sqlite_files_are_private(tmp_path: Path) -> None:
    """Catches modules stored by other users, a file that others can read, and a link to somewhere else."""
    path = tmp_path / "r.db"
    url = f"sqlite:///{path}"
    registry(open_store(url)).register("calm", **content())
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "link.db").symlink_to(path)
    with pytest.raises(SteeringError, match="others can write"):
        open_store(f"sqlite:///{tmp_path}/link.db")
    path.chmod(0o666)
    with pytest.raises(SteeringError, match="others can write"):
        open_store(url)
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(SteeringError, match="others can write"):
        open_store(url)
    tmp_path.chmod(0o700)
    with pytest.raises(RegistryUnavailableError, match="No such file"):
        open_store(f"sqlite:///{tmp_path}/missing/r.db")


def test_notices_a_replaced_sqlite_file(tmp_path: Path) -> None:
    """Catches changes that go to a deleted file after a backup was copied back."""
    path = tmp_path / "r.db"
    one = registry(open_store(f"sqlite:///{path}"))
    one.register("calm", **content())
    copy = tmp_path / "copy.db"
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o600)
    os.replace(copy, path)
    with pytest.raises(RegistryUnavailableError, match="was replaced"):
        one.register("new", **content(100))
    path.unlink()
    with pytest.raises(RegistryUnavailableError, match="No such file"):
        one.list()

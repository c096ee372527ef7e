# SPDX-License-Identifier: Apache-2.0
"""Tests of the registry directory: sharing, durability, limits and hostile content."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.registry.modules import content, module, registry, vector
from tests.repo.tree import ROOT
from vllm_steer.errors import SteeringError
from vllm_steer.fs.shared_tempdir import private_tempdir
from vllm_steer.registry import directory
from vllm_steer.registry.directory import DirectoryStore
from vllm_steer.registry.errors import RegistryUnavailableError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "registry"


def names(found: Any) -> list[str]:
    return [info.name for info in found.list().data]


@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
@pytest.mark.parametrize("nth", [1, 2])
def test_failed_write_changes_nothing(root: Path, step: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk that leaves a partial state."""
    one = registry(DirectoryStore(root))
    one.register("old", **content())
    real, calls = getattr(os, step), 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(directory.os, step, fail)
    with pytest.raises(RegistryUnavailableError, match="No space left"):
        one.register("new", **content(100))
    monkeypatch.undo()
    other = registry(DirectoryStore(root))
    assert names(one) == names(other) == ["old"]
    assert other.get("old", data=True).content.data == module().to_wire()
    one.register("new", **content(100))
    assert names(other) == ["new", "old"]


def test_retries_content_after_a_temporary_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process that reports an intact module as damaged until the registry changes."""
    one, other = registry(DirectoryStore(root)), registry(DirectoryStore(root))
    one.set(base={"post_block": {1: vector(1)}})
    opened = directory.open_readonly

    def without_descriptors(name: str, folder: int) -> int:
        if name.endswith(directory.SUFFIX):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(name, folder)

    with monkeypatch.context() as patched:
        patched.setattr(directory, "open_readonly", without_descriptors)
        with pytest.raises(RegistryUnavailableError, match="cannot be read: Too many open files"):
            other.compose({})
    assert not other.is_stale()  # not with every request
    later = time.monotonic() + directory.RETRY_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert other.is_stale()
    assert other.compose({}) == one.compose({}) != {}
    assert not other.is_stale()


def test_does_not_follow_links(root: Path, tmp_path: Path) -> None:
    """Catches a directory, index or content outside of the registry."""
    registry(DirectoryStore(root)).register("calm", **content())
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(SteeringError):
        DirectoryStore(tmp_path / "link")
    (file,) = (root / "objects").iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert registry(DirectoryStore(root)).get("calm").problem is not None
    (root / "index.json").rename(tmp_path / "index.json")
    (root / "index.json").symlink_to(tmp_path / "index.json")
    with pytest.raises(RegistryUnavailableError):
        DirectoryStore(root)


def test_names_a_directory_that_was_replaced(root: Path) -> None:
    """Catches "No such file or directory" for a folder that exists, since the server has the removed one open."""
    running = registry(DirectoryStore(root))
    shutil.rmtree(root)
    with pytest.raises(RegistryUnavailableError, match="cannot be read or written: No such file or directory"):
        running.list()
    registry(DirectoryStore(root)).register("calm", **content())
    for use in (running.list, lambda: running.register("calm", **content())):
        with pytest.raises(RegistryUnavailableError, match="was replaced; restart the server"):
            use()


def test_rejects_directory_writable_by_others(root: Path) -> None:
    """Catches modules stored by other users of the machine."""
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(SteeringError, match="others can write"):
        DirectoryStore(root)
    root.chmod(0o700)
    registry(DirectoryStore(root)).register("calm", **content())
    assert {path.stat().st_mode & 0o077 for path in root.rglob("*") if path.is_file()} == {0}


def test_private_tempdir_is_removed_at_exit() -> None:
    """Catches leftover directories, and a child process that removes the directory of its parent."""
    code = (
        "import os, sys; from vllm_steer.fs.shared_tempdir import private_tempdir\n"
        "folder = private_tempdir('steer-')\n"
        "if os.fork() == 0: sys.exit(0)\n"
        "os.wait(); print(folder, oct(os.stat(folder).st_mode & 0o777))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    folder, mode = done.stdout.split()
    assert mode == "0o700"
    assert not Path(folder).exists()


def test_private_tempdir_is_locked() -> None:
    """Catches a directory that systemd-tmpfiles removes after days without use, because it skips only locked ones."""
    with pytest.raises(BlockingIOError):
        fcntl.flock(os.open(private_tempdir("steer-"), os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file grow, as on a full disk: allocated bytes can be written again."""
    write = os.write

    def write_in_place(fd: int, data: Any) -> int:
        if os.lseek(fd, 0, os.SEEK_CUR) + len(data) > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    def no_space(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write_in_place)
    monkeypatch.setattr(os, "posix_fallocate", no_space)


@pytest.mark.parametrize("restarted", [False, True])
def test_clears_and_deletes_on_a_full_disk(root: Path, restarted: bool, request: pytest.FixtureRequest) -> None:
    """Catches global steering that stays in force because the disk has no space for the change that clears it.

    Changes that add something fail, and change nothing.
    """
    one, other = registry(DirectoryStore(root)), registry(DirectoryStore(root))
    one.register("calm", **content(100))
    one.set(modules=["calm"])
    if restarted:
        (root / "reserved").unlink()
        one = registry(DirectoryStore(root))
    request.getfixturevalue("full_disk")
    for add in (lambda: one.register("new", **content(200)), lambda: one.set(modules=[("calm", 0.5)])):
        with pytest.raises(RegistryUnavailableError, match="No space left"):
            add()
    assert one.status().modules
    one.clear()
    assert not one.status().modules and not other.status().modules
    request.getfixturevalue("monkeypatch").undo()  # vLLM's own files are freed by now
    one.set(modules=["calm"])
    one.clear()
    one.delete("calm")
    assert names(other) == []

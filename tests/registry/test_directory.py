# SPDX-License-Identifier: Apache-2.0
"""Tests of the registry directory: sharing, durability, limits and hostile content."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.registry.modules import content, module, registry, vector
from tests.repo.tree import ROOT
from vllm_steer.errors import SteeringError
from vllm_steer.fs.private_tempdir import private_tempdir
from vllm_steer.registry import directory
from vllm_steer.registry.directory import DirectoryStore
from vllm_steer.registry.errors import RegistryFullError, RegistryUnavailableError, UnknownModuleError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "registry"


def names(found: Any) -> list[str]:
    return [info.name for info in found.list().data]


def test_processes_see_each_others_changes(root: Path) -> None:
    """Catches a server that serves the old module after another one has acknowledged the new one."""
    one, other = registry(DirectoryStore(root)), registry(DirectoryStore(root))
    for i in range(5):
        registered = one.register("calm", base={"post_block": {1: vector(i)}})
        assert other.is_stale()
        assert other.get("calm").digest == registered.digest
        assert not other.is_stale()
    other.set(modules=["calm"])
    assert one.status() == other.status()
    assert one.status().epoch == 6
    assert one.delete("calm").epoch == 7
    assert names(other) == []
    assert other.status(data=True).modules[0].digest == registered.digest
    other.clear()
    assert list((root / "objects").iterdir()) == []


def test_repeated_changes_keep_the_epoch(root: Path) -> None:
    """Catches a repeated registration that creates an epoch, and a start that makes an old version current."""
    one = registry(DirectoryStore(root))
    first = one.register("calm", **content())
    assert one.register("calm", **content()) == first
    one.set(modules=["calm"])
    assert one.set(modules=["calm"]).epoch == 2
    path = root.parent / "calm.safetensors"
    path.write_bytes(next((root / "objects").iterdir()).read_bytes())
    one.register("calm", base={"post_block": {1: vector(9)}})
    one.ensure_file("calm", path)
    assert one.get("calm").versions[0] == first.digest
    assert one.get("calm").digest != first.digest


def test_keeps_the_last_versions_of_a_name(root: Path) -> None:
    """Catches an unlimited number of versions, and a version dropped below the limit."""
    one = registry(DirectoryStore(root), versions=3)
    digests = [one.register("calm", base={"post_block": {1: vector(i)}}).digest for i in range(5)]
    assert one.get("calm").versions == digests[2:]
    assert one.get(f"calm@{digests[2]}").digest == digests[2]
    with pytest.raises(UnknownModuleError, match="has no version"):
        one.get(f"calm@{digests[0]}")
    assert one.delete(f"calm@{digests[4]}").deleted == [digests[4]]
    assert one.get("calm").digest == digests[3]
    assert len(list((root / "objects").iterdir())) == 2


def test_rejects_changes_beyond_the_limits(root: Path) -> None:
    """Catches a registry without limits on names and bytes."""
    one = registry(DirectoryStore(root), modules=2, num_bytes=100)
    for name in ("a", "b"):
        one.register(name, base={"post_block": {1: vector(1)}})  # the same content counts once
    with pytest.raises(SteeringError, match="limited to 2 modules"):
        one.register("c", base={"post_block": {1: vector(1)}})
    with pytest.raises(SteeringError, match="bytes of vectors"):
        one.register("a", **content())
    assert names(one) == ["a", "b"]


def described(i: int, size: int = 300) -> dict[str, Any]:
    """Return small content with a long description: each of its characters takes six in the index."""
    return {"base": {"post_block": {1: vector(i)}}, "description": "\x01" * size}


def test_rejects_index_beyond_its_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an index that grows too large to be read, and a full registry in which nothing can be deleted."""
    monkeypatch.setattr(directory, "MAX_INDEX_BYTES", 10_000)
    monkeypatch.setattr(directory, "MAX_WRITTEN_INDEX_BYTES", 5_000)
    one, other = registry(DirectoryStore(root)), registry(DirectoryStore(root))
    for i, name in enumerate("ab"):
        one.register(name, **described(i))
    for change in (lambda: one.register("c", **described(2)), lambda: other.register("a", **described(3))):
        before = (root / "index.json").read_bytes()
        with pytest.raises(RegistryFullError, match="at most 5000 are allowed"):
            change()
        assert (root / "index.json").read_bytes() == before
        assert len(list((root / "objects").iterdir())) == 2
        for each in (one, other, registry(DirectoryStore(root))):
            assert (names(each), each.list().epoch) == (["a", "b"], 2)
    other.delete("a")
    one.register("c", **described(2))
    assert names(other) == names(registry(DirectoryStore(root))) == ["b", "c"]


def test_can_shrink_an_index_beyond_its_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rejected deletion because the remaining index is still above the limit."""
    one = registry(DirectoryStore(root))
    for i, name in enumerate("abc"):
        one.register(name, **described(i))
    monkeypatch.setattr(directory, "MAX_WRITTEN_INDEX_BYTES", 100)
    one.register("a", **described(0, size=10))
    one.delete("b")
    with pytest.raises(RegistryFullError):
        one.set(modules=["c"])
    assert names(registry(DirectoryStore(root))) == ["a", "c"]


def test_written_indexes_can_be_read() -> None:
    """Catches a write limit above the read limit."""
    assert directory.MAX_WRITTEN_INDEX_BYTES < directory.MAX_INDEX_BYTES


def test_concurrent_writers_lose_no_changes(root: Path) -> None:
    """Catches lost updates between writers. Each store represents one process."""
    stores = [registry(DirectoryStore(root)) for _ in range(4)]

    def write(i: int) -> None:
        stores[i % 4].register(f"m{i}", base={"post_block": {1: vector(i)}})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(24)))
    for each in stores:
        assert sorted(names(each)) == sorted(f"m{i}" for i in range(24))
        assert each.list().epoch == 24


# Without an engine's code, which takes long to load: what a registry does once a module is checked.
WRITER = """
import sys
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.directory import DirectoryStore
from vllm_steer.registry.module import parse_module
from vllm_steer.registry.index import RegistryLimits
store = DirectoryStore(sys.argv[1])
print("ready", flush=True)
for i in range(len(store.snapshot.index.modules), 100000):
    module = parse_module({"base": {"post_block": {1: [float(i + 1)] * 8}}})
    store.change(lambda old: old.with_module(f"m{i}", module, ModuleMetadata(), 0.0, RegistryLimits()))
    print(module.digest, flush=True)
"""


def test_killed_writer_keeps_acknowledged_changes(root: Path) -> None:
    """Catches a module acknowledged before it is stored, and a lock that outlives its holder."""
    for round_ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        acknowledged = [process.stdout.readline().strip() for _ in range(3 + 9 * round_)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
        process.wait()
        survivor = registry(DirectoryStore(root))
        assert set(acknowledged) <= {info.digest for info in survivor.list().data}
        assert all(info.problem is None for info in survivor.list().data)
        survivor.clear()
        survivor.set(base={"post_block": {1: vector(round_)}})  # the lock is free
        left = [path.name for folder in (root, root / "objects") for path in folder.iterdir()]
        assert not [name for name in left if name.startswith(".tmp")]


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


def test_rejects_damaged_content_by_name(root: Path) -> None:
    """Catches vectors other than the registered ones, and one damaged file that makes all modules unavailable."""
    one = registry(DirectoryStore(root))
    good, bad = one.register("good", **content()), one.register("bad", **content(100))
    for file, other in (("bad", "good"),):
        digests = {"good": good.digest, "bad": bad.digest}
        target = root / "objects" / f"{digests[file][7:]}.safetensors"
        target.write_bytes((root / "objects" / f"{digests[other][7:]}.safetensors").read_bytes())
    again = registry(DirectoryStore(root))
    problems = {info.name: info.problem for info in again.list().data}
    assert problems["good"] is None
    assert problems["bad"] is not None and "damaged" in problems["bad"]
    with pytest.raises(RegistryUnavailableError, match="damaged"):
        again.set(modules=["bad"])
    target.unlink()
    with pytest.raises(RegistryUnavailableError, match="missing"):
        registry(DirectoryStore(root)).set(modules=["bad"])


@pytest.mark.parametrize("at_start", [False, True])
def test_registering_again_repairs_damaged_content(at_start: bool, root: Path, tmp_path: Path) -> None:
    """Catches a module that is reported as registered but remains unavailable."""
    digest = registry(DirectoryStore(root)).register("calm", **content(100)).digest
    file = root / "objects" / f"{digest[7:]}.safetensors"
    (tmp_path / "calm.safetensors").write_bytes(file.read_bytes())
    file.write_bytes(b"")
    one, other = registry(DirectoryStore(root)), registry(DirectoryStore(root))
    assert one.get("calm").problem is not None and other.get("calm").problem is not None
    if at_start:
        one.ensure_file("calm", tmp_path / "calm.safetensors")
    else:
        assert one.register("calm", **content(100)).problem is None
    for each in (one, other, registry(DirectoryStore(root))):
        assert each.get("calm", data=True).content.data == module(100).to_wire()
        assert (each.get("calm").problem, each.get("calm").versions, each.list().epoch) == (None, [digest], 2)
    one.register("calm", **content(100))
    one.ensure_file("calm", tmp_path / "calm.safetensors")
    assert one.list().epoch == 2


def test_damaged_old_version_stays_old(root: Path, tmp_path: Path) -> None:
    """Catches a start that repairs an old version and thereby makes it current."""
    one = registry(DirectoryStore(root))
    old = one.register("calm", **content(100))
    new = one.register("calm", **content(200))
    file = root / "objects" / f"{old.digest[7:]}.safetensors"
    (tmp_path / "calm.safetensors").write_bytes(file.read_bytes())
    file.write_bytes(b"")
    again = registry(DirectoryStore(root))
    again.ensure_file("calm", tmp_path / "calm.safetensors")
    assert again.get("calm").digest == new.digest


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


def test_damaged_global_steering_prevents_start(root: Path) -> None:
    """Catches a server that continues without its global steering."""
    registry(DirectoryStore(root)).set(base={"post_block": {1: vector(1)}})
    (file,) = (root / "objects").iterdir()
    file.unlink()
    with pytest.raises(RegistryUnavailableError, match="missing"):
        registry(DirectoryStore(root))


@pytest.mark.parametrize("text", ["", "{", '{"version": 99}', '{"modules": {"x": 1}}', '{"epoch": "x"}'])
def test_damaged_index_prevents_start(root: Path, text: str) -> None:
    """Catches a registry that starts empty because its index cannot be read."""
    registry(DirectoryStore(root)).register("calm", **content())
    (root / "index.json").write_text(text)
    with pytest.raises(RegistryUnavailableError, match="index"):
        DirectoryStore(root)


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


def test_rejects_directory_writable_by_others(root: Path) -> None:
    """Catches modules stored by other users of the machine."""
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(SteeringError, match="others can write"):
        DirectoryStore(root)
    root.chmod(0o700)
    registry(DirectoryStore(root)).register("calm", **content())
    assert {path.stat().st_mode & 0o077 for path in root.rglob("*") if path.is_file()} == {0}


def test_names_are_not_used_as_paths(root: Path) -> None:
    """Catches a module name that becomes a file name."""
    one = registry(DirectoryStore(root))
    with pytest.raises(SteeringError):
        one.register("../../evil", **content())
    one.register("index.json", **content())
    assert names(registry(DirectoryStore(root))) == ["index.json"]


def test_private_tempdir_is_removed_at_exit() -> None:
    """Catches leftover directories, and a child process that removes the directory of its parent."""
    code = (
        "import os, sys; from vllm_steer.fs.private_tempdir import private_tempdir\n"
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

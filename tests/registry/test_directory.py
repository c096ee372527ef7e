# SPDX-License-Identifier: Apache-2.0
"""A registry's folder: shared, durable, and not led astray."""

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
    """Catches a server that serves the old module after another has acknowledged the new one."""
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


def test_what_changes_nothing_counts_no_epoch(root: Path) -> None:
    """Catches a retry that makes everybody read again, or a start that puts an old version first."""
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


def test_a_name_keeps_its_last_versions(root: Path) -> None:
    """Catches versions without end, and a version that is dropped while its name still has room."""
    one = registry(DirectoryStore(root), versions=3)
    digests = [one.register("calm", base={"post_block": {1: vector(i)}}).digest for i in range(5)]
    assert one.get("calm").versions == digests[2:]
    assert one.get(f"calm@{digests[2]}").digest == digests[2]
    with pytest.raises(UnknownModuleError, match="has no version"):
        one.get(f"calm@{digests[0]}")
    assert one.delete(f"calm@{digests[4]}").deleted == [digests[4]]
    assert one.get("calm").digest == digests[3]
    assert len(list((root / "objects").iterdir())) == 2


def test_limits(root: Path) -> None:
    """Catches a registry that takes all memory."""
    one = registry(DirectoryStore(root), modules=2, num_bytes=100)
    for name in ("a", "b"):
        one.register(name, base={"post_block": {1: vector(1)}})  # the same content counts once
    with pytest.raises(SteeringError, match="limited to 2 modules"):
        one.register("c", base={"post_block": {1: vector(1)}})
    with pytest.raises(SteeringError, match="bytes of vectors"):
        one.register("a", **content())
    assert names(one) == ["a", "b"]


def described(i: int, size: int = 300) -> dict[str, Any]:
    """Small content with much said about it: each of these characters is six in the index."""
    return {"base": {"post_block": {1: vector(i)}}, "description": "\x01" * size}


def test_texts_do_not_outgrow_the_index(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches texts that make an index too long to be read again, by which every process loses all modules; and a full
    registry in which nothing can be deleted."""
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


def test_an_index_beyond_its_room_can_be_made_smaller(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an index that is too long already, of which nothing can be deleted as what is left is too long, too."""
    one = registry(DirectoryStore(root))
    for i, name in enumerate("abc"):
        one.register(name, **described(i))
    monkeypatch.setattr(directory, "MAX_WRITTEN_INDEX_BYTES", 100)
    one.register("a", **described(0, size=10))
    one.delete("b")
    with pytest.raises(RegistryFullError):
        one.set(modules=["c"])
    assert names(registry(DirectoryStore(root))) == ["a", "c"]


def test_what_is_written_can_be_read() -> None:
    """Catches room for an index that is longer than what is read of one."""
    assert directory.MAX_WRITTEN_INDEX_BYTES < directory.MAX_INDEX_BYTES


def test_writers_of_many_processes_lose_nothing(root: Path) -> None:
    """Catches two writers of whom one undoes the other: each store here stands for a process."""
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


def test_a_killed_writer_loses_nothing_that_it_acknowledged(root: Path) -> None:
    """Catches a module that was acknowledged ahead of being kept, and a folder that a killed writer has locked."""
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
def test_a_failed_change_changes_nothing(root: Path, step: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a disk that is full half way: the state before it stays, whole."""
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


def test_damaged_content_is_refused_by_name(root: Path) -> None:
    """Catches other vectors than those that were registered, and one damaged file that takes all modules with it."""
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
def test_registering_it_again_mends_what_is_damaged(at_start: bool, root: Path, tmp_path: Path) -> None:
    """Catches a module that is answered as registered, and whose name is refused as before."""
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


def test_an_old_version_that_is_damaged_stays_old(root: Path, tmp_path: Path) -> None:
    """Catches a start that mends a version and thereby makes it the current one."""
    one = registry(DirectoryStore(root))
    old = one.register("calm", **content(100))
    new = one.register("calm", **content(200))
    file = root / "objects" / f"{old.digest[7:]}.safetensors"
    (tmp_path / "calm.safetensors").write_bytes(file.read_bytes())
    file.write_bytes(b"")
    again = registry(DirectoryStore(root))
    again.ensure_file("calm", tmp_path / "calm.safetensors")
    assert again.get("calm").digest == new.digest


def test_content_that_cannot_be_read_for_now_is_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process that calls a sound module damaged until somebody changes the registry."""
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


def test_damaged_global_steering_ends_the_start(root: Path) -> None:
    """Catches a server that goes on without the steering that it was told to apply to everybody."""
    registry(DirectoryStore(root)).set(base={"post_block": {1: vector(1)}})
    (file,) = (root / "objects").iterdir()
    file.unlink()
    with pytest.raises(RegistryUnavailableError, match="missing"):
        registry(DirectoryStore(root))


@pytest.mark.parametrize("text", ["", "{", '{"version": 99}', '{"modules": {"x": 1}}', '{"epoch": "x"}'])
def test_a_damaged_index_ends_the_start(root: Path, text: str) -> None:
    """Catches a registry that begins anew where it cannot read the old."""
    registry(DirectoryStore(root)).register("calm", **content())
    (root / "index.json").write_text(text)
    with pytest.raises(RegistryUnavailableError, match="index"):
        DirectoryStore(root)


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    """Catches a folder, an index or content somewhere else than in the folder."""
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


def test_a_folder_that_others_can_write_to_is_refused(root: Path) -> None:
    """Catches modules that somebody else on the machine has put there."""
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(SteeringError, match="others can write"):
        DirectoryStore(root)
    root.chmod(0o700)
    registry(DirectoryStore(root)).register("calm", **content())
    assert {path.stat().st_mode & 0o077 for path in root.rglob("*") if path.is_file()} == {0}


def test_names_are_no_paths(root: Path) -> None:
    """Catches a name that becomes a file name."""
    one = registry(DirectoryStore(root))
    with pytest.raises(SteeringError):
        one.register("../../evil", **content())
    one.register("index.json", **content())
    assert names(registry(DirectoryStore(root))) == ["index.json"]


def test_a_private_folder_goes_with_its_process() -> None:
    """Catches folders that are left behind, and a child process that takes its parent's away."""
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


def test_a_private_folder_is_not_cleared_with_old_files() -> None:
    """Catches a server that refuses everything after a quiet week: systemd-tmpfiles spares what is locked."""
    with pytest.raises(BlockingIOError):
        fcntl.flock(os.open(private_tempdir("steer-"), os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)

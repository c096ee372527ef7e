# SPDX-License-Identifier: Apache-2.0
"""Tests of what every storage of a registry must do: sharing, durability, limits and damaged content."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.registry.backends import Backend
from tests.registry.modules import content, module, registry, vector
from tests.repo.tree import ROOT
from vllm_steer.errors import SteeringError
from vllm_steer.registry import index, module_files
from vllm_steer.registry.errors import RegistryFullError, RegistryUnavailableError, UnknownModuleError
from vllm_steer.registry.module_files import write_module


def names(found: Any) -> list[str]:
    return [info.name for info in found.list().data]


def test_processes_see_each_others_changes(backend: Backend) -> None:
    """Catches a server that serves the old module after another one has acknowledged the new one."""
    one, other = registry(backend.open()), registry(backend.open())
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
    assert backend.digests() == set()


def test_repeated_changes_keep_the_epoch(backend: Backend) -> None:
    """Catches a repeated registration that creates an epoch."""
    one = registry(backend.open())
    first = one.register("calm", **content())
    assert one.register("calm", **content()) == first
    one.set(modules=["calm"])
    assert one.set(modules=["calm"]).epoch == 2


def test_file_of_the_command_line_becomes_current(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a rollback (good, bad, good again) that serves the bad file, and a replacement that no log mentions."""
    warnings: list[tuple[Any, ...]] = []
    monkeypatch.setattr("vllm_steer.registry.registry.logger.warning", lambda *args: warnings.append(args))
    path = tmp_path / "calm.safetensors"
    good, bad = write_module(module(1)), write_module(module(9))
    for data in (good, bad, good):
        path.write_bytes(data)
        one = registry(backend.open())
        one.ensure_file("calm", path)
        assert one.get("calm", data=True).content.data == module(9 if data is bad else 1).to_wire()
        epoch = one.list().epoch
        one.ensure_file("calm", path)  # the next API server
        assert one.list().epoch == epoch
    assert len(warnings) == 2


def test_keeps_the_last_versions_of_a_name(backend: Backend) -> None:
    """Catches an unlimited number of versions, and a version dropped below the limit."""
    one = registry(backend.open(), versions=3)
    digests = [one.register("calm", base={"post_block": {1: vector(i)}}).digest for i in range(5)]
    assert one.get("calm").versions == digests[2:]
    assert one.get(f"calm@{digests[2]}").digest == digests[2]
    with pytest.raises(UnknownModuleError, match="has no version"):
        one.get(f"calm@{digests[0]}")
    assert one.delete(f"calm@{digests[4]}").deleted == [digests[4]]
    assert one.get("calm").digest == digests[3]
    assert len(backend.digests()) == 2


def test_rejects_changes_beyond_the_limits(backend: Backend) -> None:
    """Catches a registry without limits on names and bytes."""
    one = registry(backend.open(), modules=2, num_bytes=100)
    for name in ("a", "b"):
        one.register(name, base={"post_block": {1: vector(1)}})  # the same content counts once
    with pytest.raises(SteeringError, match="limited to 2 modules"):
        one.register("c", base={"post_block": {1: vector(1)}})
    with pytest.raises(SteeringError, match="bytes of vectors"):
        one.register("a", **content())
    assert names(one) == ["a", "b"]


def test_can_change_a_registry_beyond_its_size(backend: Backend) -> None:
    """Catches global steering that cannot be cleared after a start with a lower `--steering-registry-mib`."""
    one = registry(backend.open())
    one.register("calm", base={"post_block": {1: vector(1)}})
    one.register("joy", base={"post_block": {1: vector(2)}})
    one.set(modules=["calm", "joy"])
    one = registry(backend.open(), num_bytes=40)
    assert [use.name for use in one.set(modules=["joy"]).modules] == ["joy"]
    assert one.clear().digest is None
    with pytest.raises(RegistryFullError, match="bytes of vectors"):
        one.register("new", base={"post_block": {1: vector(3)}})
    assert registry(backend.open()).status().digest is None


def described(i: int, size: int = 300) -> dict[str, Any]:
    """Return small content with a long description: each of its characters takes six in the index."""
    return {"base": {"post_block": {1: vector(i)}}, "description": "\x01" * size}


def test_rejects_content_whose_file_cannot_be_read(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an acknowledged module, or global steering, that other processes and later starts report as damaged."""
    monkeypatch.setattr(module_files, "MAX_HEADER_BYTES", 4096)
    one = registry(backend.open())
    tokens = list(range(0, 28, 2))
    edit = {"kind": "add", "point": "post_block", "layers": "all", "vector": vector(1), "tokens": tokens}
    with pytest.raises(SteeringError, match=r"a header of \d+ bytes; at most 4096 are allowed"):
        one.register("long", edits=[edit] * 40)
    with pytest.raises(SteeringError, match=r"write \[start, stop\] pairs"):
        one.set(edits=[edit] * 40)
    one.register("calm", edits=[edit] * 8)
    one.set(edits=[edit] * 8)
    other = registry(backend.open())
    assert names(other) == ["calm"]
    assert other.get("calm").problem is None
    assert other.status(data=True) == one.status(data=True)
    assert len(backend.digests()) == 1


def test_rejects_global_steering_that_grows_beyond_the_edits_of_a_module(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches global steering that was set in several parts, and with which no server starts again."""
    monkeypatch.setattr("vllm_steer.registry.module.MAX_EDITS", 64)
    one = registry(backend.open())
    edit = {"kind": "add", "point": "post_block", "layers": 0, "vector": vector(1)}
    one.set(edits=[edit] * 63, base={"post_block": {1: vector(2)}})
    before = one.set(base={"post_block": {1: vector(3)}})
    with pytest.raises(SteeringError, match="decode: would increase global steering to 65 edits; at most 64"):
        one.set(decode={"post_block": {1: vector(2)}})
    with pytest.raises(SteeringError, match="edits: would increase global steering to 65 edits; at most 64"):
        one.set(edits=[edit] * 64)
    assert registry(backend.open()).status() == before


def test_rejects_index_beyond_its_limit(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an index that grows too large to be read, and a full registry in which nothing can be deleted."""
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", 10_000)
    monkeypatch.setattr(index, "MAX_WRITTEN_INDEX_BYTES", 5_000)
    one, other = registry(backend.open()), registry(backend.open())
    for i, name in enumerate("ab"):
        one.register(name, **described(i))
    for change in (lambda: one.register("c", **described(2)), lambda: other.register("a", **described(3))):
        before = backend.index()
        with pytest.raises(RegistryFullError, match="at most 5000 are allowed"):
            change()
        assert backend.index() == before
        assert len(backend.digests()) == 2
        for each in (one, other, registry(backend.open())):
            assert (names(each), each.list().epoch) == (["a", "b"], 2)
    other.delete("a")
    one.register("c", **described(2))
    assert names(other) == names(registry(backend.open())) == ["b", "c"]


def test_can_shrink_an_index_beyond_its_limit(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rejected deletion because the remaining index is still above the limit."""
    one = registry(backend.open())
    for i, name in enumerate("abc"):
        one.register(name, **described(i))
    monkeypatch.setattr(index, "MAX_WRITTEN_INDEX_BYTES", 100)
    one.register("a", **described(0, size=10))
    one.delete("b")
    with pytest.raises(RegistryFullError):
        one.set(modules=["c"])
    assert names(registry(backend.open())) == ["a", "c"]


def test_written_indexes_can_be_read() -> None:
    """Catches a write limit above the read limit."""
    assert index.MAX_WRITTEN_INDEX_BYTES < index.MAX_INDEX_BYTES


def test_concurrent_writers_lose_no_changes(backend: Backend) -> None:
    """Catches lost updates between writers. Each store represents one process."""
    stores = [registry(backend.open()) for _ in range(4)]

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
from vllm_steer.registry.storage import open_store
from vllm_steer.registry.module import parse_module
from vllm_steer.registry.index import RegistryLimits
store = open_store(sys.argv[1])
print("ready", flush=True)
for i in range(len(store.snapshot.index.modules), 100000):
    module = parse_module({"base": {"post_block": {1: [float(i + 1)] * 8}}})
    store.change(lambda old: old.with_module(f"m{i}", module, ModuleMetadata(), 0.0, RegistryLimits()))
    print(module.digest, flush=True)
"""


def test_killed_writer_keeps_acknowledged_changes(backend: Backend) -> None:
    """Catches a module acknowledged before it is stored, and a lock that outlives its holder."""
    for round_ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, backend.location], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        acknowledged = [process.stdout.readline().strip() for _ in range(3 + 9 * round_)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
        process.wait()
        survivor = registry(backend.open())
        assert set(acknowledged) <= {info.digest for info in survivor.list().data}
        assert all(info.problem is None for info in survivor.list().data)
        survivor.clear()
        survivor.set(base={"post_block": {1: vector(round_)}})  # the lock is free
        assert backend.leftovers() == []


def test_rejects_damaged_content_by_name(backend: Backend) -> None:
    """Catches vectors other than the registered ones, and one damaged file that makes all modules unavailable."""
    one = registry(backend.open())
    good, bad = one.register("good", **content()), one.register("bad", **content(100))
    backend.damage(bad.digest, backend.content(good.digest))
    again = registry(backend.open())
    problems = {info.name: info.problem for info in again.list().data}
    assert problems["good"] is None
    assert problems["bad"] is not None and "damaged" in problems["bad"]
    with pytest.raises(RegistryUnavailableError, match="damaged"):
        again.set(modules=["bad"])
    backend.damage(bad.digest, None)
    with pytest.raises(RegistryUnavailableError, match="missing"):
        registry(backend.open()).set(modules=["bad"])


@pytest.mark.parametrize("at_start", [False, True])
def test_registering_again_repairs_damaged_content(at_start: bool, backend: Backend, tmp_path: Path) -> None:
    """Catches a module that is reported as registered but remains unavailable."""
    digest = registry(backend.open()).register("calm", **content(100)).digest
    (tmp_path / "calm.safetensors").write_bytes(backend.content(digest))
    backend.damage(digest, b"")
    one, other = registry(backend.open()), registry(backend.open())
    assert one.get("calm").problem is not None and other.get("calm").problem is not None
    if at_start:
        one.ensure_file("calm", tmp_path / "calm.safetensors")
    else:
        assert one.register("calm", **content(100)).problem is None
    for each in (one, other, registry(backend.open())):
        assert each.get("calm", data=True).content.data == module(100).to_wire()
        assert (each.get("calm").problem, each.get("calm").versions, each.list().epoch) == (None, [digest], 2)
    one.register("calm", **content(100))
    one.ensure_file("calm", tmp_path / "calm.safetensors")
    assert one.list().epoch == 2


def test_damaged_old_version_is_registered_again(backend: Backend, tmp_path: Path) -> None:
    """Catches a start that leaves the damaged content of its file in place."""
    one = registry(backend.open())
    old = one.register("calm", **content(100))
    one.register("calm", **content(200))
    (tmp_path / "calm.safetensors").write_bytes(backend.content(old.digest))
    backend.damage(old.digest, b"")
    again = registry(backend.open())
    again.ensure_file("calm", tmp_path / "calm.safetensors")
    assert again.get("calm").digest == old.digest
    assert again.get("calm").problem is None


def test_damaged_global_steering_prevents_start(backend: Backend) -> None:
    """Catches a server that continues without its global steering."""
    registry(backend.open()).set(base={"post_block": {1: vector(1)}})
    (digest,) = backend.digests()
    backend.damage(digest, None)
    with pytest.raises(RegistryUnavailableError, match="missing"):
        registry(backend.open())


def test_global_steering_that_cannot_be_served_is_named_at_start(backend: Backend) -> None:
    """Catches a start that fails with the number of a module, without where it comes from and what to do."""
    one = registry(backend.open())
    one.register("calm", base={"post_block": {1: vector(1)}})
    one.set(modules=["calm"])
    with pytest.raises(
        SteeringError, match=r"^steering registry: its global steering cannot be served: modules\[0\]: .* and clear it$"
    ):
        registry(backend.open(), max_norm=1)


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 99}', '{"modules": {"x": 1}}', '{"epoch": "x"}', '{"modules": {"\udcff": []}}']
)
def test_damaged_index_prevents_start(backend: Backend, text: str) -> None:
    """Catches a registry that starts empty because its index cannot be read, and an error of Python's for it."""
    registry(backend.open()).register("calm", **content())
    backend.damage_index(text.encode(errors="surrogateescape"))
    with pytest.raises(RegistryUnavailableError, match="index"):
        backend.open()


def test_names_are_not_used_as_paths(backend: Backend) -> None:
    """Catches a module name that becomes a file name."""
    one = registry(backend.open())
    with pytest.raises(SteeringError):
        one.register("../../evil", **content())
    one.register("index.json", **content())
    assert names(registry(backend.open())) == ["index.json"]


@pytest.mark.parametrize("nth", [1, 2])
def test_full_disk_changes_nothing(backend: Backend, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk that leaves a partial state, whichever write it rejects."""
    one = registry(backend.open())
    one.register("old", **content())
    with monkeypatch.context() as patched:
        reason = backend.fill_disk(patched, nth)
        with pytest.raises(RegistryUnavailableError, match=reason):
            one.register("new", **content(100))
    other = registry(backend.open())
    assert names(one) == names(other) == ["old"]
    assert other.get("old", data=True).content.data == module().to_wire()
    one.register("new", **content(100))
    assert names(other) == ["new", "old"]


def test_starts_together(backend: Backend) -> None:
    """Catches a start that fails, or that loses a module, because another server creates the storage as well."""

    def start(i: int) -> None:
        registry(backend.open()).register(f"m{i}", base={"post_block": {1: vector(i)}})

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(start, range(6)))
    assert names(registry(backend.open())) == [f"m{i}" for i in range(6)]

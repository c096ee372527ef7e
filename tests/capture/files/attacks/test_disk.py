# SPDX-License-Identifier: Apache-2.0
"""Full, missing and read-only disks, and quotas: errors state the cause, no partial file stays, writers recover."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.capture.captured import assert_same, captured
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files import directory
from vllm_steer.capture.files.directory import CaptureWriteError, QuotaExceededError
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.errors import SteeringError

LAYOUTS = ("per_request", "packed", "sharded")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Disk:
    """Wrappers of the system calls that use disk space, which fail at chosen calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail_at: dict[str, int] = {}
        self.code = errno.ENOSPC
        self.calls: dict[str, int] = {}
        for name in ("pwritev", "ftruncate", "rename", "fsync"):
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name, real):
        def call(*args, **kwargs):
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.fail_at.get(name) == self.calls[name]:
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        return call


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def left(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def ids(root: Path) -> list[str]:
    return sorted(request.request_id for request in open_captures(root))


@layouts
def test_full_disk(tmp_path, disk, layout):
    """Catches (1) a second of three requests that takes others with it and (2) a partial file."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    first, third = captured("first"), captured("third", seed=3)
    consumer.accept(first)
    disk.fail_at["pwritev"] = disk.calls["pwritev"] + 1
    with pytest.raises(CaptureWriteError, match="No space left on device") as caught:
        consumer.accept(captured("second"))
    assert str(tmp_path) not in str(caught.value), "clients read this"
    assert ids(tmp_path) == ["first"], "requests reported as ok must be readable at once"
    assert not any(name.endswith(".part") for name in left(tmp_path))
    consumer.accept(third)
    consumer.close()
    assert ids(tmp_path) == ["first", "third"]
    for request in (first, third):
        assert_same(open_captures(tmp_path).find(request.request_id)[0], request)


@layouts
def test_disk_full_from_the_first_request(tmp_path, disk, layout):
    """Catches files left behind by failed requests."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    for _ in range(3):
        disk.fail_at["pwritev"] = disk.calls.get("pwritev", 0) + 1
        with pytest.raises(CaptureWriteError, match="No space left"):
            consumer.accept(captured())
        assert left(tmp_path) == []
    consumer.close()


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_failure_to_publish(tmp_path, disk, call):
    """Catches a partial file that stays."""
    disk.code = errno.EIO
    consumer = FilesystemConsumer(root=str(tmp_path), fsync=True)
    disk.fail_at[call] = disk.calls.get(call, 0) + 1
    with pytest.raises(CaptureWriteError, match="Input/output error"):
        consumer.accept(captured("second"))
    assert left(tmp_path) == []
    consumer.accept(captured("third"))
    consumer.close()
    assert ids(tmp_path) == ["third"]


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("call", [1, 2])
def test_failure_to_sync_a_stream(tmp_path, disk, layout, call):
    """Catches ok for a request that is not on the disk, and earlier requests that become unreadable."""
    disk.code = errno.EIO
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, fsync=True)
    consumer.accept(captured("first"))
    disk.fail_at["fsync"] = disk.calls["fsync"] + 1
    with pytest.raises(CaptureWriteError, match="Input/output error"):
        consumer.accept(captured("second"))
    disk.fail_at["pwritev"] = disk.calls["pwritev"] + call
    assert "first" in ids(tmp_path)
    consumer.close()
    assert "first" in ids(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_full_disk_at_the_end_of_a_stream(tmp_path, disk, layout, caplog):
    """Catches requests reported as ok that are lost because the stream cannot be ended."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, max_requests=2)
    consumer.accept(captured("first"))
    disk.fail_at["pwritev"] = disk.calls["pwritev"] + 2
    consumer.accept(captured("second"))
    assert ids(tmp_path) == ["first", "second"] and "its end is not marked" in caplog.text
    consumer.close()
    assert ids(tmp_path) == ["first", "second"]


@layouts
def test_file_size_limit_of_the_kernel(tmp_path, layout):
    """Catches errors that only a real system call raises."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    consumer.accept(captured("first"))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, old[1]))
    try:
        with pytest.raises(CaptureWriteError, match="File too large"):
            consumer.accept(captured("second", rows=4000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert ids(tmp_path) == ["first"] and len(left(tmp_path)) == 1
    consumer.accept(captured("third", rows=4000))
    consumer.close()
    assert ids(tmp_path) == ["first", "third"]


@layouts
def test_short_writes(tmp_path, monkeypatch, layout):
    """Catches the rest of a short write skipped: zeros that look like rows."""
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, offset: real(fd, [memoryview(buffers[0]).cast("B")[:100]], offset)
    )
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    request = captured(rows=50, width=7)
    consumer.accept(request)
    consumer.close()
    assert_same(next(iter(open_captures(tmp_path))), request)


def test_more_buffers_than_iov_max(tmp_path):
    """Catches a single ``pwritev`` with more buffers than the kernel accepts."""
    sites = tuple(("post_block", layer) for layer in range(3000))
    request = captured(rows=1, width=2, sites=sites)
    FilesystemConsumer(root=str(tmp_path)).accept(request)
    assert_same(next(iter(open_captures(tmp_path))), request)


class TestRoot:
    @layouts
    def test_deleted_root(self, tmp_path, layout):
        """Catches a deleted root that is silently created again, and a writer that does not recover."""
        root = tmp_path / "root"
        consumer = FilesystemConsumer(root=str(root), layout=layout)
        consumer.accept(captured("first"))
        shutil.rmtree(root)
        for _ in range(2):
            with pytest.raises(CaptureWriteError, match="vanished"):
                consumer.accept(captured("second"))
        assert not root.exists()
        root.mkdir()
        consumer.accept(captured("third"))
        consumer.close()
        assert ids(root) == ["third"] and len(left(root)) == 1

    @layouts
    def test_root_moved_and_created_again(self, tmp_path, layout):
        """Catches rows lost by log rotation: the old directory keeps its requests, the new one gets later ones."""
        root, old = tmp_path / "root", tmp_path / "old"
        consumer = FilesystemConsumer(root=str(root), layout=layout)
        consumer.accept(captured("first"))
        root.rename(old)
        root.mkdir()
        consumer.accept(captured("second"))
        consumer.close()
        assert (ids(old), ids(root)) == (["first"], ["second"])
        assert len(left(old)) == len(left(root)) == 1

    @layouts
    def test_root_replaced_by_a_link(self, tmp_path, layout):
        """Catches rows written to the target of the link."""
        root, away, other = tmp_path / "root", tmp_path / "away", tmp_path / "other"
        consumer = FilesystemConsumer(root=str(root), layout=layout)
        consumer.accept(captured("first"))
        other.mkdir()
        root.rename(away)
        root.symlink_to(other)
        with pytest.raises(CaptureWriteError, match="vanished"):
            consumer.accept(captured("second"))
        consumer.close()
        assert left(other) == [] and ids(away) == ["first"]

    @layouts
    def test_read_only_directory(self, layout):
        """Catches a writer that does not recover after the permissions are restored."""
        with unprivileged_directory() as root:
            consumer = FilesystemConsumer(root=str(root), layout=layout)
            root.chmod(0o555)
            with pytest.raises(CaptureWriteError, match="Permission denied"):
                consumer.accept(captured())
            assert left(root) == []
            root.chmod(0o755)
            consumer.accept(captured())
            consumer.close()
            assert ids(root) == ["request"]

    def test_read_only_file_system(self, tmp_path, monkeypatch):
        """Catches an error without its cause."""
        consumer = FilesystemConsumer(root=str(tmp_path))
        real = os.open

        def opened(path, flags, *args, **kwargs):
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", opened)
        with pytest.raises(CaptureWriteError, match="Read-only file system"):
            consumer.accept(captured())

    def test_unwritable_root_is_rejected_at_the_start(self, tmp_path):
        """Catches a server that starts and loses every capture."""
        with unprivileged_directory() as root:
            root.chmod(0o555)
            for path in (root, root / "below"):
                with pytest.raises(SteeringError, match=r"root: .*Permission denied"):
                    FilesystemConsumer(root=str(path))
        (tmp_path / "file").touch()
        with pytest.raises(SteeringError, match=r"^root: "):
            FilesystemConsumer(root=str(tmp_path / "file"))

    def test_home_directory_and_empty_root(self, tmp_path, monkeypatch):
        """Catches captures in a folder named ``~``, and in the present directory because a variable was not set."""
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)
        consumer = FilesystemConsumer(root="~/acts")
        consumer.accept(captured())
        consumer.close()
        assert ids(tmp_path / "home" / "acts") == ["request"]
        with pytest.raises(SteeringError, match="root: is empty; name a directory"):
            FilesystemConsumer(root="")
        with pytest.raises(SteeringError, match="root: cannot write captures to ~unknown-user/acts"):
            FilesystemConsumer(root="~unknown-user/acts")
        assert [*tmp_path.iterdir()] == [tmp_path / "home"]

    def test_failures_leak_no_descriptor(self, tmp_path, disk, monkeypatch):
        """Catches a descriptor leaked by each failure: after a thousand, no file can be opened."""

        def open_now():
            return len(os.listdir("/proc/self/fd"))

        consumers = [FilesystemConsumer(root=str(tmp_path / layout), layout=layout) for layout in LAYOUTS]
        before = open_now()
        for consumer in consumers:
            for call in ("pwritev", "ftruncate", "rename"):
                disk.fail_at = {call: disk.calls.get(call, 0) + 1}
                for _ in range(3):
                    try:
                        consumer.accept(captured())
                        consumer.close()
                    except CaptureWriteError:
                        pass
            consumer.close()
        with monkeypatch.context() as no_locks:
            no_locks.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
            for consumer in consumers:
                with pytest.raises(CaptureWriteError, match="No locks available"):
                    consumer.accept(captured())
        assert open_now() == before
        assert not any(path.name.endswith(".part") for path in tmp_path.rglob(".*"))


class TestQuota:
    @layouts
    def test_quota_is_never_exceeded(self, tmp_path, layout):
        """Catches a quota that ignores headers or the index."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, quota=200_000)
        accepted = 0
        with pytest.raises(QuotaExceededError, match=r"quota of 200000 bytes .* used, .* needed"):
            for i in range(1000):
                consumer.accept(captured(f"r{i}"))
                accepted += 1
        consumer.close()
        assert accepted > 5 and len(list(open_captures(tmp_path))) == accepted
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200_000

    @layouts
    def test_existing_files_count(self, tmp_path, layout):
        """Catches a quota of the files of this process only."""
        (tmp_path / "old").write_bytes(bytes(200_000))
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, quota=200_100)
        with pytest.raises(QuotaExceededError, match="200000 used"):
            consumer.accept(captured())
        assert left(tmp_path) == ["old"]
        consumer.close()

    @layouts
    def test_deleted_files_free_quota(self, tmp_path, layout, monkeypatch):
        """Catches a count that only grows, so that a full server stays full."""
        old = tmp_path / "old"
        old.write_bytes(bytes(200_000))
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, quota=200_100)
        monkeypatch.setattr(directory, "_RECOUNT_SECONDS", 0.0)
        with pytest.raises(QuotaExceededError):
            consumer.accept(captured())
        old.unlink()
        consumer.accept(captured())
        consumer.close()
        assert ids(tmp_path) == ["request"]

    @layouts
    def test_failed_writes_release_quota(self, tmp_path, layout, disk):
        """Catches reserved bytes that stay counted after a failure."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, quota=400_000)
        for _ in range(100):
            disk.fail_at = {"pwritev": disk.calls.get("pwritev", 0) + 1}
            with pytest.raises(CaptureWriteError, match="No space"):
                consumer.accept(captured(rows=100))
        consumer.accept(captured(rows=100))
        consumer.close()

    @layouts
    def test_used_bytes_match_the_directory(self, tmp_path, layout, disk):
        """Catches unused reservations and files counted twice."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
        for i in range(30):
            disk.fail_at = {"pwritev": disk.calls.get("pwritev", 0) + (1 if i % 7 == 3 else 10**9)}
            try:
                consumer.accept(captured(f"r{i}", rows=i))
            except CaptureWriteError:
                continue
        consumer.close()
        (layout,) = consumer._layouts.values()
        used = layout._directory._used
        assert used == sum(path.stat().st_size for path in tmp_path.iterdir()) > 0


@contextmanager
def unprivileged_directory():
    """Yield a directory whose permissions apply. A superuser switches to an unprivileged user."""
    root = Path(tempfile.mkdtemp(prefix="captures-"))
    was = os.geteuid()
    try:
        if was == 0:
            os.chown(root, 65534, 65534)
            os.seteuid(65534)
        yield root
    finally:
        os.seteuid(was)
        shutil.rmtree(root)

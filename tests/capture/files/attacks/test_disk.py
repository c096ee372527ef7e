# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, gone, read-only or over its quota: the cause is told, no half file stays, and it can recover."""

from __future__ import annotations

import errno
import fcntl
import logging
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
    """Stands in front of the calls that take disk space; each fails with its turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail_at: dict[str, int] = {}
        self.code = errno.ENOSPC
        self.calls: dict[str, int] = {}
        for name in ("posix_fallocate", "pwritev", "ftruncate", "rename", "fsync"):
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
@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev"])
def test_full_disk(tmp_path, disk, layout, call):
    """The second of three requests finds the disk full: it alone is lost."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    first, third = captured("first"), captured("third", seed=3)
    consumer.accept(first)
    disk.fail_at[call] = disk.calls[call] + 1
    with pytest.raises(CaptureWriteError, match="No space left on device") as caught:
        consumer.accept(captured("second"))
    assert str(tmp_path) not in str(caught.value), "a client reads this"
    assert ids(tmp_path) == ["first"], "what was promised is safe at once"
    assert not any(name.endswith(".part") for name in left(tmp_path))
    consumer.accept(third)
    consumer.close()
    assert ids(tmp_path) == ["first", "third"]
    for request in (first, third):
        assert_same(open_captures(tmp_path).find(request.request_id)[0], request)


@layouts
@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev"])
def test_disk_that_is_full_from_the_first_request_on(tmp_path, disk, layout, call):
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    for _ in range(3):
        disk.fail_at[call] = disk.calls.get(call, 0) + 1
        with pytest.raises(CaptureWriteError, match="No space left"):
            consumer.accept(captured())
        assert left(tmp_path) == []
    consumer.close()


@layouts
@pytest.mark.parametrize("call", ["ftruncate", "rename", "fsync"])
def test_failure_to_publish(tmp_path, disk, layout, call, caplog):
    """Catches a file that stays half, or a request that is called ok and is nowhere."""
    disk.code = errno.EIO
    consumer = FilesystemConsumer(
        root=str(tmp_path), layout=layout, fsync=True, max_requests=None if layout == "per_request" else 2
    )
    if layout != "per_request":
        consumer.accept(captured("first"))
    disk.fail_at[call] = disk.calls.get(call, 0) + 1
    with pytest.raises(CaptureWriteError, match="Input/output error"):
        consumer.accept(captured("second"))
    assert left(tmp_path) == []
    # The first one's status has been told already: the loss of its file is an error in the log.
    lost = [record for record in caplog.records if "lost, with captures of 2 requests" in record.getMessage()]
    assert len(lost) == (0 if layout == "per_request" else 1) and all(r.levelno == logging.ERROR for r in lost)
    consumer.accept(captured("third"))
    consumer.close()
    assert ids(tmp_path) == ["third"]


@layouts
def test_file_size_limit_of_the_system(tmp_path, layout):
    """The same with a limit that the kernel enforces, not a stand-in."""
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
def test_a_write_that_takes_less_than_all_goes_on(tmp_path, monkeypatch, layout):
    """Catches the rest of a short write left out: rows of zeros that look like rows."""
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, offset: real(fd, [memoryview(buffers[0]).cast("B")[:100]], offset)
    )
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    request = captured(rows=50, width=7)
    consumer.accept(request)
    consumer.close()
    assert_same(next(iter(open_captures(tmp_path))), request)


def test_more_buffers_than_one_call_takes(tmp_path):
    sites = tuple(("post_block", layer) for layer in range(3000))
    request = captured(rows=1, width=2, sites=sites)
    FilesystemConsumer(root=str(tmp_path)).accept(request)
    assert_same(next(iter(open_captures(tmp_path))), request)


class TestRoot:
    @layouts
    def test_vanished(self, tmp_path, layout, caplog):
        """A removed root takes along what is in it; what comes after is refused, and served once there is one again."""
        root = tmp_path / "root"
        consumer = FilesystemConsumer(root=str(root), layout=layout)
        consumer.accept(captured("first"))
        shutil.rmtree(root)
        for _ in range(2):
            with pytest.raises(CaptureWriteError, match="vanished"):
                consumer.accept(captured("second"))
        assert not root.exists()
        assert ("is lost, with captures of 1 requests" in caplog.text) == (layout != "per_request")
        root.mkdir()
        consumer.accept(captured("third"))
        consumer.close()
        assert ids(root) == ["third"] and len(left(root)) == 1

    @layouts
    def test_moved_and_made_anew(self, tmp_path, layout):
        """As logs are rotated: the old folder keeps what was promised, the new one gets what comes."""
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
    def test_exchanged_for_a_link(self, tmp_path, layout):
        """Catches rows written to wherever the root's name leads by then."""
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
    def test_read_only(self, layout):
        with unprivileged_folder() as root:
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
        consumer = FilesystemConsumer(root=str(tmp_path))
        real = os.open

        def opened(path, flags, *args, **kwargs):
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", opened)
        with pytest.raises(CaptureWriteError, match="Read-only file system"):
            consumer.accept(captured())

    def test_a_root_that_cannot_be_written_is_refused_at_the_start(self, tmp_path):
        with unprivileged_folder() as root:
            root.chmod(0o555)
            for path in (root, root / "below"):
                with pytest.raises(SteeringError, match=r"root: .*Permission denied"):
                    FilesystemConsumer(root=str(path))
        (tmp_path / "file").touch()
        with pytest.raises(SteeringError, match=r"^root: "):
            FilesystemConsumer(root=str(tmp_path / "file"))

    def test_no_descriptor_is_left_open(self, tmp_path, disk, monkeypatch):
        """Catches a descriptor lost with each failure: after a thousand of them, nothing more can be opened."""

        def open_now():
            return len(os.listdir("/proc/self/fd"))

        consumers = [FilesystemConsumer(root=str(tmp_path / layout), layout=layout) for layout in LAYOUTS]
        before = open_now()
        for consumer in consumers:
            for call in ("posix_fallocate", "pwritev", "ftruncate", "rename"):
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
    def test_it_is_never_passed_and_says_so(self, tmp_path, layout):
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
    def test_files_that_were_there_count(self, tmp_path, layout):
        (tmp_path / "old").write_bytes(bytes(200_000))
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, quota=200_100)
        with pytest.raises(QuotaExceededError, match="200000 used"):
            consumer.accept(captured())
        assert left(tmp_path) == ["old"]
        consumer.close()

    @layouts
    def test_room_that_was_made_is_found(self, tmp_path, layout, monkeypatch):
        """Catches a count that only ever grows, so that a server once full stays full."""
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
    @pytest.mark.parametrize("call", ["posix_fallocate", "pwritev"])
    def test_failures_give_their_bytes_back(self, tmp_path, layout, disk, call):
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, quota=400_000)
        for _ in range(100):
            disk.fail_at = {call: disk.calls.get(call, 0) + 1}
            with pytest.raises(CaptureWriteError, match="No space"):
                consumer.accept(captured(rows=100))
        consumer.accept(captured(rows=100))
        consumer.close()

    @layouts
    def test_what_is_counted_is_what_is_there(self, tmp_path, layout, disk):
        """Catches space that was reserved and not used, counted for ever, and a file counted twice."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
        for i in range(30):
            disk.fail_at = {"pwritev": disk.calls.get("pwritev", 0) + (1 if i % 7 == 3 else 10**9)}
            try:
                consumer.accept(captured(f"r{i}", rows=i))
            except CaptureWriteError:
                continue
        consumer.close()
        used = consumer._layout._directory._used
        assert used == sum(path.stat().st_size for path in tmp_path.iterdir()) > 0


@contextmanager
def unprivileged_folder():
    """A folder whose permissions count: for the superuser they would not, so nobody goes on in its place."""
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

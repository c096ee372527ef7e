# SPDX-License-Identifier: Apache-2.0
"""Users with write access to the root cannot make the server read or write other files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.capture.captured import assert_same, captured
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files import rotation
from vllm_steer.capture.files.format import hashed_stem
from vllm_steer.capture.files.reader import open_captures

NAME = f"{hashed_stem('request', 0)}.safetensors"


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_bytes(b"precious")
    yield path
    assert path.read_bytes() == b"precious"


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.mark.parametrize("name", [NAME, f".{NAME}.part"])
@pytest.mark.parametrize("dangling", [False, True])
def test_link_at_the_file_name_is_not_followed(root, victim, name, dangling):
    """Catches a write through a symbolic link."""
    consumer = FilesystemConsumer(root=str(root))
    target = root.parent / "not-there" if dangling else victim
    (root / name).symlink_to(target)
    request = captured()
    path = Path(consumer.accept(request)["path"])
    assert path.name != NAME and path.parent == root and (root / name).is_symlink()
    assert not (root.parent / "not-there").exists()
    (there,) = open_captures(root).find("request")
    assert_same(there, request)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
@pytest.mark.parametrize("name", [NAME, f".{NAME}.part"])
def test_other_entries_at_the_file_name(root, make, name):
    """Catches a writer that blocks on opening a pipe."""
    consumer = FilesystemConsumer(root=str(root))
    make(root / name)
    path = Path(consumer.accept(captured())["path"])
    assert path.is_file() and path.name != NAME


def test_link_at_a_shard_name_is_not_followed(root, victim, monkeypatch):
    """Catches a write through a link at the name of a shard."""
    monkeypatch.setattr("vllm_steer.capture.files.rotation.timestamped_stem", lambda name, time_ns: "guessed")
    (root / "guessed.arrows").symlink_to(victim)
    consumer = FilesystemConsumer(root=str(root), layout="sharded")
    path = Path(consumer.accept(captured())["path"])
    consumer.close()
    assert path.is_file() and not path.is_symlink()


def test_shard_names_are_unguessable():
    """Catches names for which links can be prepared."""
    assert len({rotation.timestamped_stem("sharded", 0)[-8:] for _ in range(100)}) == 100


def test_replaced_part_file_is_not_published(root, victim, monkeypatch):
    """Catches a rename of whatever entry has the name of the part file."""
    consumer = FilesystemConsumer(root=str(root), fsync=True)
    real = os.fsync

    def replace(fd):
        (part,) = root.glob(".*.part")
        part.unlink()
        part.symlink_to(victim)
        real(fd)

    monkeypatch.setattr(os, "fsync", replace)
    with pytest.raises(RuntimeError, match="vanished"):
        consumer.accept(captured())
    assert list(open_captures(root)) == []


def test_replaced_stream_is_not_written_to(root, victim):
    """Catches requests appended to whatever entry has the name of the open stream."""
    consumer = FilesystemConsumer(root=str(root), layout="sharded")
    path = Path(consumer.accept(captured("first"))["path"])
    path.unlink()
    path.symlink_to(victim)
    other = Path(consumer.accept(captured("second"))["path"])
    consumer.close()
    assert other != path and [request.request_id for request in open_captures(root)] == ["second"]


def test_reader_skips_links(root, tmp_path):
    """Catches a reader that follows links out of the directory."""
    outside = FilesystemConsumer(root=str(tmp_path / "outside"))
    secret = outside.accept(captured("secret"))["path"]
    (root / "link.safetensors").symlink_to(secret)
    (root / "linked").symlink_to(tmp_path / "outside")
    FilesystemConsumer(root=str(root)).accept(captured("own"))
    assert [request.request_id for request in open_captures(root)] == ["own"]


class TestStalePartFiles:
    def test_stale_part_file_is_removed(self, root):
        """Catches part files that stay after a crash."""
        part = root / f".{NAME}.part"
        part.write_bytes(b"half")
        FilesystemConsumer(root=str(root))
        assert not part.exists()

    def test_part_file_of_a_running_writer_stays(self, root):
        """Catches a second server that ends or deletes the open shard of the first."""
        first = FilesystemConsumer(root=str(root), layout="sharded")
        first.accept(captured("a"))
        FilesystemConsumer(root=str(root))
        first.accept(captured("b"))
        first.close()
        assert [request.request_id for request in open_captures(root)] == ["a", "b"]
        assert len(list(root.iterdir())) == 1

    @pytest.mark.parametrize("name", ["..part", "notes.part", ".notes.txt", f"{NAME}.part", ".NOTES.safetensors.part"])
    def test_other_files_stay(self, root, name):
        """Catches a name pattern that matches files of users."""
        (root / name).write_bytes(b"mine")
        FilesystemConsumer(root=str(root))
        assert (root / name).read_bytes() == b"mine"

    def test_link_named_like_a_part_file_is_not_followed(self, root, victim):
        """Catches the target of a link locked or truncated."""
        (root / f".{NAME}.part").symlink_to(victim)
        FilesystemConsumer(root=str(root))

    def test_part_file_removed_before_it_is_locked(self, root, monkeypatch):
        """Catches a writer of an unlinked file.

        Another process starts between the creation of the part file and its lock.
        """
        real, taken = fcntl.flock, []

        def flock(fd, how):
            if not taken:
                taken.append(fd)
                os.unlink(next(path for path in root.iterdir() if path.name.endswith(".part")))
            return real(fd, how)

        consumer = FilesystemConsumer(root=str(root))
        monkeypatch.setattr(fcntl, "flock", flock)
        path = Path(consumer.accept(captured())["path"])
        assert taken and path.is_file() and len(list(open_captures(root))) == 1

# SPDX-License-Identifier: Apache-2.0
"""Streams: incomplete ends, damage, and repair by the next writer."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.capture.captured import assert_same, captured
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files.format import CaptureFileError
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.capture.files.stream import END_OF_STREAM
from vllm_steer.capture.files.stream_file import StreamFile, _map

REQUESTS = [captured(f"r{i}", seed=i, rows=i + 1, width=3, dtype=torch.bfloat16) for i in range(3)]


@pytest.fixture
def stream(tmp_path: Path) -> tuple[Path, bytes, list[int]]:
    """A stream of three requests that was not ended, its bytes, and its size after the header and each request."""
    consumer = FilesystemConsumer(root=str(tmp_path / "written"), layout="sharded")
    ends = []
    for request in REQUESTS:
        path = Path(consumer.accept(request)["path"])
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    consumer.close()
    root = tmp_path / "root"
    root.mkdir()
    return root / path.name, data, ends


def ids(path: Path) -> list[str]:
    return [request.request_id for request in open_captures(path)]


def read_all(path: Path) -> None:
    """Read the stream and compare it with what was written."""
    found = list(open_captures(path))
    for request, expected in zip(found, REQUESTS, strict=True):
        assert_same(request, expected)


def test_stream_that_ends_anywhere(stream):
    """Catches an incomplete request shown as whole, and whole ones that an incomplete one hides."""
    path, data, ends = stream
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        assert ids(path) == [f"r{i}" for i, end in enumerate(ends) if end <= size], size
    path.write_bytes(data + END_OF_STREAM)
    assert StreamFile(path).sealed and ids(path) == ["r0", "r1", "r2"]


@pytest.mark.parametrize(
    "garbage", [bytes(64), b"\xff" * 64, END_OF_STREAM * 3 + b"x"], ids=["zeros", "ones", "markers"]
)
def test_garbage_at_the_end_of_an_open_stream(stream, garbage):
    """Catches whole requests hidden by what a system crash left behind them."""
    path, data, _ = stream
    path.write_bytes(data + garbage)
    assert ids(path) == ["r0", "r1", "r2"]


def test_requests_that_are_appended_while_a_stream_is_scanned(stream, monkeypatch):
    """Catches a stream reported as damaged because its writer completes a request and goes on during the scan."""
    path, data, ends = stream

    def map_and_append(mapped_path):
        mapped = _map(mapped_path)
        with path.open("ab") as file:
            file.write((data + END_OF_STREAM)[len(mapped) :])
        return mapped

    monkeypatch.setattr("vllm_steer.capture.files.stream_file._map", map_and_append)
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        assert len(StreamFile(path)) == sum(end <= size for end in ends), size


def test_large_request_that_ends_anywhere(tmp_path):
    """Catches an incomplete request of several batches that is shown as whole or taken for damage."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout="sharded")
    first = Path(consumer.accept(captured("first"))["path"])
    start = first.stat().st_size
    consumer.accept(captured("large", rows=70, width=1024))
    data = first.read_bytes()
    consumer.close()
    for size in range(start, len(data), 4099):
        first.write_bytes(data[:size])
        assert ids(first) == ["first"], size
    first.write_bytes(data)
    assert ids(first) == ["first", "large"]


@pytest.mark.parametrize("sealed", [True, False])
def test_flipped_bytes(stream, sealed):
    """Catches changed rows, tokens or properties that are returned as if they were stored.

    Bytes of the last request of an open stream are left out: an end that cannot be parsed is an incomplete request.
    """
    path, data, ends = stream
    whole = data + END_OF_STREAM if sealed else data
    last = len(data) if sealed else ends[-2]
    detected = 0
    for at in range(last):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        try:
            read_all(path)  # bytes without a meaning, such as padding, may change
        except CaptureFileError as error:
            assert path.name in str(error)
            detected += 1
    assert detected > last // 2


def test_flipped_bytes_of_an_open_end(stream):
    """Catches changed rows in the last request of an open stream; the request may be taken for incomplete."""
    path, data, ends = stream
    for at in range(ends[-2], len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x10
        path.write_bytes(changed)
        try:
            found = list(open_captures(path))
            for request, expected in zip(found, REQUESTS, strict=False):
                assert_same(request, expected)
            assert len(found) >= 2
        except CaptureFileError:
            continue


def test_random_damage(stream):
    """Catches crashes of the process and errors of other types: blocks are overwritten at random."""
    path, data, _ = stream
    generator = random.Random(0)
    for _ in range(300):
        changed = bytearray(data + END_OF_STREAM)
        for _ in range(generator.randint(1, 4)):
            start = generator.randrange(len(changed))
            block = generator.randbytes(generator.randint(1, 40))
            changed[start : start + len(block)] = block
        path.write_bytes(changed)
        try:
            for request in open_captures(path):
                for site in request.sites:
                    request.tensor(*site), request.positions(*site)
        except CaptureFileError:
            continue


def test_rows_full_of_markers(tmp_path):
    """Catches rows that are taken for messages: float32 rows of the bytes ff ff ff ff."""
    rows = torch.from_numpy(np.full((200, 50), 0xFFFFFFFF, np.uint32).view(np.float32))
    request = captured(rows=200, width=50)
    sites = {site: type(old)(old.positions, rows) for site, old in request.sites.items()}
    request = type(request)(**{**vars(request), "sites": sites})
    consumer = FilesystemConsumer(root=str(tmp_path), layout="packed")
    path = Path(consumer.accept(request)["path"])
    consumer.accept(request)
    data = path.read_bytes()
    consumer.close()
    path.write_bytes(data[:-100])
    (found,) = open_captures(path)
    assert_same(found, request)


class TestRepair:
    @pytest.mark.parametrize("cut", [0, 1, 9, 300])
    def test_incomplete_request_is_cut_off(self, stream, cut, caplog):
        """Catches whole requests lost at the next start, and an incomplete one that stays."""
        path, data, _ = stream
        path.write_bytes(data[: len(data) - cut])
        with caplog.at_level(logging.WARNING):
            FilesystemConsumer(root=str(path.parent))
        assert ids(path) == ["r0", "r1", "r2"][: 2 + (not cut)]
        assert StreamFile(path).sealed and f"Repaired {path.name}" in caplog.text
        repaired = path.read_bytes()
        FilesystemConsumer(root=str(path.parent))
        assert path.read_bytes() == repaired

    def test_stream_without_requests_is_removed(self, stream):
        """Catches empty files that stay after each crash."""
        path, data, ends = stream
        path.write_bytes(data[: ends[0] - 1])
        FilesystemConsumer(root=str(path.parent))
        assert not path.exists()

    def test_damaged_stream_is_not_cut(self, stream, caplog):
        """Catches whole requests that are cut off behind a damaged one."""
        path, data, ends = stream
        changed = bytearray(data)
        changed[ends[0] + 4 : ends[0] + 8] = b"\xff\xff\xff\x7f"  # the size of the second request's metadata
        path.write_bytes(changed)
        FilesystemConsumer(root=str(path.parent))
        assert path.read_bytes() == changed and "was not repaired" in caplog.text
        with pytest.raises(CaptureFileError, match="damaged after byte"):
            ids(path)

    def test_streams_of_others_stay(self, stream):
        """Catches files of users that are cut off or ended."""
        path, data, _ = stream
        other = path.with_name("mine.arrows")
        other.write_bytes(data[:-5])
        FilesystemConsumer(root=str(path.parent))
        assert other.read_bytes() == data[:-5]


@pytest.mark.parametrize(("key", "value", "message"), [("format", "x", "another Arrow"), ("version", "3", "version 3")])
def test_other_streams(tmp_path, key, value, message):
    """Catches another Arrow stream, or a later version, read as a capture file."""
    pa = pytest.importorskip("pyarrow")
    metadata = {"format": "vllm-steer capture", "version": "2", key: value}
    path = tmp_path / "x.arrows"
    with pa.ipc.new_stream(str(path), pa.schema([("a", pa.int32())], metadata=metadata)):
        pass
    with pytest.raises(CaptureFileError, match=message):
        list(open_captures(path))

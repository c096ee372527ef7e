# SPDX-License-Identifier: Apache-2.0
"""Program files: the engine reads the program that was sent, or refuses it."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from vllm_steer.errors import SteeringError
from vllm_steer.program import program_files as module
from vllm_steer.program.program_files import MIN_PROGRAM_BYTES, ProgramFileCache, ProgramRef, fetch_program

SIZE = 2 * MIN_PROGRAM_BYTES


def program(seed: int, size: int = SIZE) -> bytes:
    """Return bytes that differ only in the middle, so that all have the same cache key."""
    return b"h" * (size // 2) + bytes([seed]) + b"t" * (size - size // 2 - 1)


def elsewhere(seed: int, size: int = SIZE) -> bytes:
    """Return bytes that differ at the start."""
    return bytes([seed]) + b"t" * (size - 1)


@pytest.fixture
def files() -> Iterator[ProgramFileCache]:
    made = ProgramFileCache()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_fetched() -> None:
    module._fetched.clear()


def sent(files: ProgramFileCache, data: bytes) -> bytes:
    """Send ``data`` twice and return the reference."""
    files.reference(data)
    reference = files.reference(data)
    assert reference is not None
    return reference


def path_of(reference: bytes) -> Path:
    return Path(msgspec.msgpack.decode(reference, type=ProgramRef).path)


def test_repeated_program_is_sent_by_reference(files: ProgramFileCache) -> None:
    """Catches a file for every program, and repeated programs that are sent in full."""
    data = elsewhere(1)
    assert files.reference(data) is None
    reference = files.reference(data)
    assert reference is not None and len(reference) < 200
    assert files.reference(bytes(bytearray(data))) == reference
    assert fetch_program(reference) == data and fetch_program(reference) is fetch_program(reference)


def test_small_programs_are_sent_in_full(files: ProgramFileCache) -> None:
    assert [files.reference(elsewhere(1, MIN_PROGRAM_BYTES - 1)) for _ in range(3)] == [None] * 3


def test_programs_with_equal_cache_keys_are_distinguished(files: ProgramFileCache) -> None:
    """Catches vectors of another request, found by key and not compared."""
    reference = sent(files, program(1))
    assert [files.reference(program(2)) for _ in range(3)] == [None] * 3
    assert fetch_program(reference) == program(1) and files.reference(program(1)) == reference


@pytest.mark.parametrize("change", ["gone", "other", "cut", "empty"])
def test_rejects_changed_files(files: ProgramFileCache, change: str) -> None:
    """Catches edits with wrong vectors, and errors other than SteeringError."""
    reference = sent(files, elsewhere(1))
    path = path_of(reference)
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes({"other": elsewhere(2), "cut": elsewhere(1)[:-1], "empty": b""}[change])
    with pytest.raises(SteeringError, match="send it again") as raised:
        fetch_program(reference)
    assert str(path.parent) not in str(raised.value)


@pytest.mark.parametrize("reference", [b"", b"x", "text", None, 3, msgspec.msgpack.encode(["\0", 1, b""])])
def test_rejects_invalid_references(reference: object) -> None:
    """Catches an exception that would end the scheduler."""
    with pytest.raises(SteeringError):
        fetch_program(reference)


def test_removed_file_is_written_again(files: ProgramFileCache) -> None:
    """Catches references to a removed file for as long as the server runs."""
    data = elsewhere(1)
    path_of(sent(files, data)).unlink()
    assert fetch_program(sent(files, data)) == data


def test_total_size_is_limited_and_old_files_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk, and a file removed while the scheduler may still read it."""
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    files = ProgramFileCache(2 * SIZE)
    try:
        first, second = sent(files, elsewhere(1)), sent(files, elsewhere(2))
        assert [files.reference(elsewhere(3)) for _ in range(2)] == [None, None]
        now += module.MIN_FILE_AGE / 2
        assert files.reference(elsewhere(1)) == first
        now += module.MIN_FILE_AGE / 2
        third = sent(files, elsewhere(3))
        # The second file is old enough; the first one was used in between.
        assert (
            not path_of(second).exists()
            and fetch_program(first) == elsewhere(1)
            and fetch_program(third) == elsewhere(3)
        )
        assert [files.reference(elsewhere(2)) for _ in range(2)] == [None, None]
    finally:
        files.close()


def test_files_are_private_to_the_owner(files: ProgramFileCache) -> None:
    """Catches files that other users can read or change."""
    path = path_of(sent(files, elsewhere(1)))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_close_removes_the_files(files: ProgramFileCache) -> None:
    data = elsewhere(1)
    folder = path_of(sent(files, data)).parent
    files.close()
    assert not folder.exists()
    assert [files.reference(data) for _ in range(3)] == [None] * 3


def test_full_disk_is_logged_once_and_programs_are_sent_in_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a full disk that fails requests."""

    def full(*args: object, **kwargs: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "NamedTemporaryFile", full)
    warned: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *args: warned.append(text % args))
    files = ProgramFileCache()
    assert [files.reference(elsewhere(i)) for i in (1, 2, 1, 2, 1)] == [None] * 5
    assert len(warned) == 1 and "No space left" in warned[0]

# SPDX-License-Identifier: Apache-2.0
"""Large programs that cross to the engine once: what is fetched is what was sent, or nothing is."""

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
    """Bytes that differ in the middle only: all have the same place."""
    return b"h" * (size // 2) + bytes([seed]) + b"t" * (size - size // 2 - 1)


def elsewhere(seed: int, size: int = SIZE) -> bytes:
    """Bytes that differ in the head."""
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
    """The reference for what has been sent once before."""
    files.reference(data)
    reference = files.reference(data)
    assert reference is not None
    return reference


def path_of(reference: bytes) -> Path:
    return Path(msgspec.msgpack.decode(reference, type=ProgramRef).path)


def test_what_comes_for_the_second_time_is_sent_by_name(files: ProgramFileCache) -> None:
    """Catches a file for every program that comes once, and bytes that cross again and again."""
    data = elsewhere(1)
    assert files.reference(data) is None
    reference = files.reference(data)
    assert reference is not None and len(reference) < 200
    assert files.reference(bytes(bytearray(data))) == reference
    assert fetch_program(reference) == data and fetch_program(reference) is fetch_program(reference)


def test_small_ones_are_sent(files: ProgramFileCache) -> None:
    assert [files.reference(elsewhere(1, MIN_PROGRAM_BYTES - 1)) for _ in range(3)] == [None] * 3


def test_programs_that_are_alike_are_not_mixed_up(files: ProgramFileCache) -> None:
    """Catches the vectors of another request: found by place and not compared."""
    reference = sent(files, program(1))
    assert [files.reference(program(2)) for _ in range(3)] == [None] * 3
    assert fetch_program(reference) == program(1) and files.reference(program(1)) == reference


@pytest.mark.parametrize("change", ["gone", "other", "cut", "empty"])
def test_a_file_that_is_not_what_was_written_is_refused(files: ProgramFileCache, change: str) -> None:
    """Catches an edit with other vectors than were asked for, and an error that is not the request's."""
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
def test_what_is_no_ticket_is_refused(reference: object) -> None:
    """Catches an exception that would end the scheduler."""
    with pytest.raises(SteeringError):
        fetch_program(reference)


def test_a_file_that_was_tidied_up_is_written_again(files: ProgramFileCache) -> None:
    """Catches tickets for a file that is no longer there, for as long as the server runs."""
    data = elsewhere(1)
    path_of(sent(files, data)).unlink()
    assert fetch_program(sent(files, data)) == data


def test_files_have_a_limit_and_make_room_when_they_have_rested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a disk that fills, and a file that is taken away while the scheduler may still read it."""
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
        # The second had rested; the first was sent for in between.
        assert (
            not path_of(second).exists()
            and fetch_program(first) == elsewhere(1)
            and fetch_program(third) == elsewhere(3)
        )
        assert [files.reference(elsewhere(2)) for _ in range(2)] == [None, None]
    finally:
        files.close()


def test_only_the_owner_can_look(files: ProgramFileCache) -> None:
    """Catches vectors that other users of the machine can read or change."""
    path = path_of(sent(files, elsewhere(1)))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_stays_when_it_is_closed(files: ProgramFileCache) -> None:
    data = elsewhere(1)
    folder = path_of(sent(files, data)).parent
    files.close()
    assert not folder.exists()
    assert [files.reference(data) for _ in range(3)] == [None] * 3


def test_without_a_place_for_files_all_is_sent_and_said_once(
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

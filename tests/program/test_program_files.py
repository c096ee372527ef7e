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
from vllm_steer.program.program_files import LARGE, ProgramFileCache, ProgramRef, fetch

SIZE = 2 * LARGE


def program(seed: int, size: int = SIZE) -> bytes:
    """Bytes that differ in the middle only: all have the same place."""
    return b"h" * (size // 2) + bytes([seed]) + b"t" * (size - size // 2 - 1)


def elsewhere(seed: int, size: int = SIZE) -> bytes:
    """Bytes that differ in the head."""
    return bytes([seed]) + b"t" * (size - 1)


@pytest.fixture
def shelf() -> Iterator[ProgramFileCache]:
    made = ProgramFileCache()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_fetched() -> None:
    module._fetched.clear()


def sent(shelf: ProgramFileCache, data: bytes) -> bytes:
    """The ticket for what has been sent once before."""
    shelf.ticket(data)
    ticket = shelf.ticket(data)
    assert ticket is not None
    return ticket


def path_of(ticket: bytes) -> Path:
    return Path(msgspec.msgpack.decode(ticket, type=ProgramRef).path)


def test_what_comes_for_the_second_time_is_sent_by_name(shelf: ProgramFileCache) -> None:
    """Catches a file for every program that comes once, and bytes that cross again and again."""
    data = elsewhere(1)
    assert shelf.ticket(data) is None
    ticket = shelf.ticket(data)
    assert ticket is not None and len(ticket) < 200
    assert shelf.ticket(bytes(bytearray(data))) == ticket
    assert fetch(ticket) == data and fetch(ticket) is fetch(ticket)


def test_small_ones_are_sent(shelf: ProgramFileCache) -> None:
    assert [shelf.ticket(elsewhere(1, LARGE - 1)) for _ in range(3)] == [None] * 3


def test_programs_that_are_alike_are_not_mixed_up(shelf: ProgramFileCache) -> None:
    """Catches the vectors of another request: found by place and not compared."""
    ticket = sent(shelf, program(1))
    assert [shelf.ticket(program(2)) for _ in range(3)] == [None] * 3
    assert fetch(ticket) == program(1) and shelf.ticket(program(1)) == ticket


@pytest.mark.parametrize("change", ["gone", "other", "cut", "empty"])
def test_a_file_that_is_not_what_was_written_is_refused(shelf: ProgramFileCache, change: str) -> None:
    """Catches an edit with other vectors than were asked for, and an error that is not the request's."""
    ticket = sent(shelf, elsewhere(1))
    path = path_of(ticket)
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes({"other": elsewhere(2), "cut": elsewhere(1)[:-1], "empty": b""}[change])
    with pytest.raises(SteeringError, match="send it again") as raised:
        fetch(ticket)
    assert str(path.parent) not in str(raised.value)


@pytest.mark.parametrize("ticket", [b"", b"x", "text", None, 3, msgspec.msgpack.encode(["\0", 1, b""])])
def test_what_is_no_ticket_is_refused(ticket: object) -> None:
    """Catches an exception that would end the scheduler."""
    with pytest.raises(SteeringError):
        fetch(ticket)


def test_a_file_that_was_tidied_up_is_written_again(shelf: ProgramFileCache) -> None:
    """Catches tickets for a file that is no longer there, for as long as the server runs."""
    data = elsewhere(1)
    path_of(sent(shelf, data)).unlink()
    assert fetch(sent(shelf, data)) == data


def test_files_have_a_limit_and_make_room_when_they_have_rested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a disk that fills, and a file that is taken away while the scheduler may still read it."""
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    shelf = ProgramFileCache(2 * SIZE)
    try:
        first, second = sent(shelf, elsewhere(1)), sent(shelf, elsewhere(2))
        assert [shelf.ticket(elsewhere(3)) for _ in range(2)] == [None, None]
        now += module.RESTS / 2
        assert shelf.ticket(elsewhere(1)) == first
        now += module.RESTS / 2
        third = sent(shelf, elsewhere(3))
        # The second had rested; the first was sent for in between.
        assert not path_of(second).exists() and fetch(first) == elsewhere(1) and fetch(third) == elsewhere(3)
        assert [shelf.ticket(elsewhere(2)) for _ in range(2)] == [None, None]
    finally:
        shelf.close()


def test_only_the_owner_can_look(shelf: ProgramFileCache) -> None:
    """Catches vectors that other users of the machine can read or change."""
    path = path_of(sent(shelf, elsewhere(1)))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_stays_when_it_is_closed(shelf: ProgramFileCache) -> None:
    data = elsewhere(1)
    folder = path_of(sent(shelf, data)).parent
    shelf.close()
    assert not folder.exists()
    assert [shelf.ticket(data) for _ in range(3)] == [None] * 3


def test_without_a_place_for_files_all_is_sent_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a full disk that fails requests."""

    def full(*args: object, **kwargs: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "NamedTemporaryFile", full)
    warned: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *args: warned.append(text % args))
    shelf = ProgramFileCache()
    assert [shelf.ticket(elsewhere(i)) for i in (1, 2, 1, 2, 1)] == [None] * 5
    assert len(warned) == 1 and "No space left" in warned[0]

# SPDX-License-Identifier: Apache-2.0
"""Streams of both clients, cut wherever a network may cut them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from vllm_steer import AsyncClient, Client
from vllm_steer.client import events as module

# Where str.splitlines ends a line and server-sent events do not, of those that JSON has as they are, and one character
# of four bytes. The others, of which JSON makes escapes, are in ESCAPED.
BARE = ("a\u2028b", "\u2029", "\x85c\x85", "d\U0001f600")
ESCAPED = ("\x0b\x0c", "\x1c\x1d\x1e", "\r\n")
WORDS = (*BARE, *ESCAPED)
ENDS = ("\n", "\r\n", "\r")


def said(end: str, last: str = "[DONE]") -> bytes:
    """A stream that says ``WORDS``, with a comment and another field between."""
    lines = [": ping", "event: message"]
    for word in WORDS:
        event = {"choices": [{"index": 0, "delta": {"content": word}}]}
        lines += [f"data: {json.dumps(event, ensure_ascii=False)}", ""]
    return end.join((*lines, f"data: {last}")).encode()


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that comes in these pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


def server(pieces: list[bytes]) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(200, stream=Pieces(pieces)))


async def heard(pieces: list[bytes]) -> list[str]:
    """What both clients make of a stream."""
    with Client(transport=server(pieces), model="tiny") as client:
        found = [piece.text for piece in client.stream_chat([])]
    async with AsyncClient(transport=server(pieces), model="tiny") as other:
        assert [piece.text async for piece in other.stream_chat([])] == found
    return found


@pytest.mark.parametrize("end", ENDS)
async def test_words_with_characters_that_end_lines_elsewhere(end: str) -> None:
    """Catches a stream that breaks, or loses a piece, at a character that is part of what the model says."""
    assert await heard([said(end)]) == list(WORDS)


@pytest.mark.parametrize("end", ENDS)
async def test_any_cut(end: str) -> None:
    """Catches a character, a line or a line's end of two bytes that is lost where two pieces of a stream meet."""
    whole = said(end)
    assert await heard([whole[i : i + 1] for i in range(len(whole))]) == list(WORDS)
    for cut in range(len(whole) + 1):
        pieces = [whole[:cut], whole[cut:]]
        assert [event["choices"][0]["delta"]["content"] for event in module.iter_events(iter(pieces))] == list(WORDS), (
            cut
        )


async def test_a_last_line_without_an_end() -> None:
    """Catches a last piece that is lost since the server has closed the stream right behind it."""
    last = json.dumps({"choices": [{"index": 0, "delta": {"content": "end"}}]})
    assert await heard([said("\n", last)]) == [*WORDS, "end"]
    with pytest.raises(json.JSONDecodeError):
        await heard([said("\n", last[:-1])])


async def test_a_long_line_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches work that grows with the square of a line's length: the line so far looked at again with each piece."""
    looked_at = 0

    class Ends:
        def split(self, piece: bytes) -> list[bytes]:
            nonlocal looked_at
            looked_at += len(piece)
            return ends.split(piece)

    ends = module._LINE_END
    monkeypatch.setattr(module, "_LINE_END", Ends())
    line = b"data: " + json.dumps({"rows": "x" * 10_000}).encode()
    assert len(list(module.iter_events(iter([line[i : i + 10] for i in range(0, len(line), 10)])))) == 1
    assert looked_at <= len(line) + 1

# SPDX-License-Identifier: Apache-2.0
"""Event streams of both clients, with arbitrary chunk boundaries."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from vllm_steer import AsyncClient, Client
from vllm_steer.client import endpoints as module

# Characters at which str.splitlines ends a line and server-sent events do not: unescaped in JSON (and one character of
# four bytes), and escaped.
BARE = ("a\u2028b", "\u2029", "\x85c\x85", "d\U0001f600")
ESCAPED = ("\x0b\x0c", "\x1c\x1d\x1e", "\r\n")
WORDS = (*BARE, *ESCAPED)
ENDS = ("\n", "\r\n", "\r")


def stream_of_words(end: str, last: str = "[DONE]") -> bytes:
    """Return a stream of ``WORDS``, with a comment and another field."""
    lines = [": ping", "event: message"]
    for word in WORDS:
        event = {"choices": [{"index": 0, "delta": {"content": word}}]}
        lines += [f"data: {json.dumps(event, ensure_ascii=False)}", ""]
    return end.join((*lines, f"data: {last}")).encode()


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A response body in given chunks."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


def server(pieces: list[bytes]) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(200, stream=Chunks(pieces)))


async def texts_of(pieces: list[bytes]) -> list[str]:
    """Return the texts that both clients read from a stream."""
    with Client(transport=server(pieces), model="tiny") as client:
        found = [piece.text for piece in client.stream_chat([])]
    async with AsyncClient(transport=server(pieces), model="tiny") as other:
        assert [piece.text async for piece in other.stream_chat([])] == found
    return found


@pytest.mark.parametrize("end", ENDS)
async def test_line_separators_inside_strings(end: str) -> None:
    """Catches a stream split at a character of the generated text."""
    assert await texts_of([stream_of_words(end)]) == list(WORDS)


@pytest.mark.parametrize("end", ENDS)
async def test_any_chunk_boundary(end: str) -> None:
    """Catches characters, lines or CRLF lost at a chunk boundary."""
    complete = stream_of_words(end)
    assert await texts_of([complete[i : i + 1] for i in range(len(complete))]) == list(WORDS)
    for cut in range(len(complete) + 1):
        pieces = [complete[:cut], complete[cut:]]
        assert [event["choices"][0]["delta"]["content"] for event in module.iter_events(iter(pieces))] == list(WORDS), (
            cut
        )


async def test_last_line_without_line_end() -> None:
    """Catches a last event lost because the server closed the stream after it."""
    last = json.dumps({"choices": [{"index": 0, "delta": {"content": "end"}}]})
    assert await texts_of([stream_of_words("\n", last)]) == [*WORDS, "end"]
    with pytest.raises(json.JSONDecodeError):
        await texts_of([stream_of_words("\n", last[:-1])])


async def test_long_lines_are_scanned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches quadratic work: the unfinished line scanned again with every chunk."""
    num_scanned = 0

    class Ends:
        def split(self, piece: bytes) -> list[bytes]:
            nonlocal num_scanned
            num_scanned += len(piece)
            return ends.split(piece)

    ends = module._LINE_END
    monkeypatch.setattr(module, "_LINE_END", Ends())
    line = b"data: " + json.dumps({"rows": "x" * 10_000}).encode()
    assert len(list(module.iter_events(iter([line[i : i + 10] for i in range(0, len(line), 10)])))) == 1
    assert num_scanned <= len(line) + 1

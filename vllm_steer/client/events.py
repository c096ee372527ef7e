# SPDX-License-Identifier: Apache-2.0
"""Parser of server-sent events.

httpx's ``iter_lines`` splits lines as ``str.splitlines`` does, also at characters such as U+2028 that JSON strings may
contain. Lines of server-sent events end at CR, LF or CRLF only.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

_LINE_END = re.compile(rb"[\r\n]+")
_DATA = b"data: "


def iter_events(stream: Iterator[bytes]) -> Iterator[Mapping[str, Any]]:
    """Parse the JSON objects of a stream, each on a single ``data:`` line."""
    parser = _EventParser()
    for chunk in stream:
        yield from parser.feed(chunk)
    yield from parser.feed(b"\n")


async def aiter_events(stream: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """Parse an asynchronous stream as :func:`iter_events` does."""
    parser = _EventParser()
    async for chunk in stream:
        for event in parser.feed(chunk):
            yield event
    for event in parser.feed(b"\n"):
        yield event


class _EventParser:
    """Incremental parser of chunks with arbitrary boundaries."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # parts of the unfinished line

    def feed(self, chunk: bytes) -> Iterator[Mapping[str, Any]]:
        """Yield the objects on the lines that end in ``chunk``."""
        first, *rest = _LINE_END.split(chunk)
        self._line.append(first)
        for start in rest:
            line = b"".join(self._line)
            self._line = [start]
            if line.startswith(_DATA + b"{"):
                yield json.loads(line[len(_DATA) :].decode("utf-8", "replace"))

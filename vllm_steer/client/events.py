# SPDX-License-Identifier: Apache-2.0
"""The events of a stream, from its bytes.

Not from httpx's lines: those end wherever ``str.splitlines`` ends one, also at characters that JSON may have within its
strings. Lines of server-sent events end at CR, LF or both, and their text is UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

_ENDS = re.compile(rb"[\r\n]+")
_DATA = b"data: "


def events(stream: Iterator[bytes]) -> Iterator[Mapping[str, Any]]:
    """The objects that a stream of server-sent events says, each in one line."""
    lines = _Lines()
    for piece in stream:
        yield from lines.feed(piece)
    yield from lines.feed(b"\n")


async def async_events(stream: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """As `events`, of a stream that is awaited."""
    lines = _Lines()
    async for piece in stream:
        for event in lines.feed(piece):
            yield event
    for event in lines.feed(b"\n"):
        yield event


class _Lines:
    """A stream that comes in pieces, which are cut anywhere."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []  # of the line whose end has not come

    def feed(self, piece: bytes) -> Iterator[Mapping[str, Any]]:
        """The objects in the lines that end in ``piece``."""
        first, *others = _ENDS.split(piece)
        self._begun.append(first)
        for begun in others:
            line = b"".join(self._begun)
            self._begun = [begun]
            if line.startswith(_DATA + b"{"):
                yield json.loads(line[len(_DATA) :].decode("utf-8", "replace"))

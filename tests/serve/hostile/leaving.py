# SPDX-License-Identifier: Apache-2.0
"""Clients that vanish in the middle of a steered request with captures, each in one of many ways."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import psutil

from tests.serve.server import HIDDEN, LAYERS, MODEL
from vllm_steer.spec import pack_vector

PROMPT = "x" * 150
ROW_BYTES = 4 * HIDDEN
CAPTURE = {"memory": {"hooks": dict.fromkeys(("pre_attn", "post_attn", "post_block"), "all"), "positions": "all"}}
ROUND_BYTES = 3 * LAYERS * len(PROMPT) * ROW_BYTES
"""What the rows of a round's prompt alone take."""
_HANDLE = re.compile(rb'"id": ?"([\w-]{43})"')


@dataclass
class Leavers:
    """Rounds of clients that leave; what they were given before they left is theirs, and they delete it."""

    url: str
    answered: int = 0
    """Clients that had their whole answer before they could leave."""
    handles: list[str] = field(default_factory=list)

    async def rounds(self, first: int, last: int, concurrency: int) -> None:
        """Rounds ``first`` to ``last``, so many at a time."""
        numbers = iter(range(first, last))

        async def work() -> None:
            for number in numbers:
                await self._round(number)

        await asyncio.gather(*(work() for _ in range(concurrency)))
        async with httpx.AsyncClient(base_url=self.url) as client:
            while self.handles:
                await client.delete(f"/v1/captures/{self.handles.pop()}")

    async def _round(self, number: int) -> None:
        draw = random.Random(number)
        where = httpx.URL(self.url)
        reader, writer = await asyncio.open_connection(where.host, where.port)
        stream = draw.random() < 0.5
        request = _request(where, _body(number, stream))
        cut = draw.random() < 0.1  # some leave in the middle of their own body
        writer.write(request[: draw.randrange(len(request))] if cut else request)
        await writer.drain()
        received = b""
        if stream and not cut and draw.random() < 0.7:
            for _ in range(draw.randrange(1, 12)):  # headers, then events
                received += await reader.readline()
        elif draw.random() < 0.8:
            await asyncio.sleep(draw.random() * 0.05)
        for _ in range(5):  # what has come, the event loop reads now
            await asyncio.sleep(0)
        if reader._buffer:  # type: ignore[attr-defined]
            received += await reader.read(1 << 24)
        found = _HANDLE.search(received)
        if found:
            self.answered += 1
            self.handles.append(found[1].decode())
        if draw.random() < 0.3:  # without a farewell
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


def _body(number: int, stream: bool) -> dict[str, Any]:
    vector = pack_vector(np.random.default_rng(number).standard_normal(HIDDEN).astype("f4"))
    return {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "temperature": 0, "stream": stream,
        "steering_vectors": {"post_block": {"1": vector}}, "capture": CAPTURE,
    }  # fmt: skip


def _request(where: httpx.URL, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {where.host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def resident(port: int) -> int:
    """Bytes in memory of all processes of the server on ``port``: API servers, engines, and their parent."""
    mains = [p for p in psutil.Process().children(recursive=True) if str(port) in p.cmdline()]
    processes = {process.pid: process for main in mains for process in (main, *main.children(recursive=True))}
    return sum(process.memory_info().rss for process in processes.values())

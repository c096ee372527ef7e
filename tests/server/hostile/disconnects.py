# SPDX-License-Identifier: Apache-2.0
"""Clients that disconnect during a steered request with captures, in many ways."""

from __future__ import annotations

import asyncio
import contextlib
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

from tests.server.server import HIDDEN, LAYERS, MODEL
from vllm_steer.request import pack_vector

PROMPT = "x" * 150
ROW_BYTES = 4 * HIDDEN
CAPTURE = {"memory": {"hooks": dict.fromkeys(("pre_attn", "post_attn", "post_block"), "all"), "positions": "all"}}
ROUND_BYTES = 3 * LAYERS * len(PROMPT) * ROW_BYTES
"""Size in bytes of the captured rows of one request's prompt."""
_RECV_BYTES = 1 << 20
_CLOSING_SECONDS = 60
"""Longest time in which a server detects a disconnect and closes the connection."""
_HANDLE = re.compile(rb'"id": ?"([\w-]{43})"')


@dataclass
class DisconnectingClients:
    """Rounds of clients that disconnect. They delete the captures that they received.

    A response can cross with a disconnect: it is sent before the server detects it. Most clients shut down their side
    first and then read what arrives, so that such responses are counted on any machine. A client that closes at once
    reads only what arrived before.
    """

    url: str
    answered: int = 0
    """Number of clients that received the whole response before they disconnected."""
    crossed: int = 0
    """Number of clients that received the whole response after they shut down their side."""
    handles: list[str] = field(default_factory=list)

    async def rounds(self, first: int, last: int, concurrency: int) -> None:
        """Run rounds ``first`` to ``last``, ``concurrency`` at a time."""
        numbers = iter(range(first, last))

        async def work() -> None:
            for number in numbers:
                await self._round(number)

        await asyncio.gather(*(work() for _ in range(concurrency)))
        async with httpx.AsyncClient(base_url=self.url) as client:
            while self.handles:
                await client.delete(f"/v1/captures/{self.handles.pop()}")

    async def _round(self, number: int) -> None:
        loop, rng, url = asyncio.get_running_loop(), random.Random(number), httpx.URL(self.url)
        stream = rng.random() < 0.5
        request = _request(url, _body(number, stream))
        if cut := rng.random() < 0.1:  # some disconnect in the middle of their request
            request = request[: rng.randrange(len(request))]
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, (url.host, url.port))
            await loop.sock_sendall(client, request)
            received = b""
            if stream and not cut and rng.random() < 0.7:
                lines = rng.randrange(1, 12)  # headers, then events
                while received.count(b"\n") < lines and (piece := await loop.sock_recv(client, _RECV_BYTES)):
                    received += piece
            elif rng.random() < 0.8:
                await asyncio.sleep(rng.random() * 0.05)
            received += _receive_available(client)
            late = b""
            if rng.random() < 0.3:  # close at once; no `await` from here on
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            else:
                client.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(_CLOSING_SECONDS):
                    while piece := await loop.sock_recv(client, _RECV_BYTES):
                        late += piece
        if handle := _HANDLE.search(received + late):
            self.handles.append(handle[1].decode())
            if handle.end() <= len(received):
                self.answered += 1
            else:
                self.crossed += 1


def _receive_available(client: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(BlockingIOError):
        while piece := client.recv(_RECV_BYTES):
            received += piece
    return received


def _body(number: int, stream: bool) -> dict[str, Any]:
    vector = pack_vector(np.random.default_rng(number).standard_normal(HIDDEN).astype("f4"))
    return {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "temperature": 0, "stream": stream,
        "steering_vectors": {"post_block": {"1": vector}}, "capture": CAPTURE,
    }  # fmt: skip


def _request(url: httpx.URL, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def resident_bytes(port: int) -> int:
    """Return the memory in bytes of all processes of the server on ``port``: API servers, engines, and their parent."""
    mains = [process for process in psutil.Process().children(recursive=True) if str(port) in _command(process)]
    processes = {process.pid: process for main in mains for process in (main, *main.children(recursive=True))}
    return sum(process.memory_info().rss for process in processes.values())


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.ZombieProcess:  # ended by an earlier test
        return []

# SPDX-License-Identifier: Apache-2.0
"""Registrations of modules during which a process is killed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx

from tests.server.requests import V

MODULES = "/v1/steering/modules"
_STREAMS, _NAMES = 4, 50


def register_during_a_kill(
    urls: Sequence[str], kill: Callable[[], None], *, each: int, kill_at: int, seed: int = 0
) -> dict[str, str]:
    """Return the digests of the last acknowledged modules of four streams of registrations.

    Each registration uses a new connection, so that all processes behind a URL receive some. A stream ends with its
    server, after one registration at least. Names are ``mSEED.STREAM.NUMBER``.

    Args:
        urls: The servers, which the streams use in turn.
        kill: Called by the first stream.
        each: Registrations of a stream.
        kill_at: Number of the first stream's registration after which ``kill`` is called.
        seed: Part of the names.
    """
    acknowledged: dict[str, str] = {}
    all_began = Barrier(_STREAMS, timeout=60)

    def stream(number: int) -> None:
        with contextlib.suppress(httpx.TransportError):
            for i in range(each):
                name = f"m{seed}.{number}.{i % _NAMES}"
                body = {"name": name, "base": {"post_block": {"1": (V * (i + 1) / (number + 1)).tolist()}}}
                # Without verification, which would load all certificates for each connection.
                response = httpx.post(f"{urls[number % len(urls)]}{MODULES}", json=body, timeout=20, verify=False)
                if response.status_code != 200:
                    return
                acknowledged[name] = response.json()["digest"]
                if i == 0:
                    all_began.wait()
                if number == 0 and i == kill_at:
                    kill()

    with ThreadPoolExecutor(_STREAMS) as streams:
        list(streams.map(stream, range(_STREAMS)))
    return acknowledged

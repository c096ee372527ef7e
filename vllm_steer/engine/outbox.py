# SPDX-License-Identifier: Apache-2.0
"""Captured rows in the scheduler's process: held from the step that made them to the next output of their request.

vLLM's outputs have one free-form field per request, ``kv_transfer_params``; rows ride in it under one key, beside
whatever a KV connector put there, and the front end takes them out before anybody else looks. A step in the middle of
a chunked prefill has no output, so its rows wait here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from vllm_steer.engine.collect import ATTRIBUTE, Chunk

OUTPUT_KEY = "__steer_rows__"


class Outbox:
    """Chunks by request, in the order of the steps that made them."""

    def __init__(self) -> None:
        self._held: dict[str, list[Chunk | str]] = {}

    def take_in(self, model_output: Any, live: Container[str]) -> None:
        """Rows of one step; those of requests that have ended (the surplus step of async scheduling) are dropped."""
        chunks: Iterable[Chunk] = getattr(model_output, ATTRIBUTE, ())
        for chunk in chunks:
            if chunk.request_id in live:
                self._held.setdefault(chunk.request_id, []).append(chunk)

    def hand_out(self, outputs: Mapping[int, Any], live: Container[str]) -> None:
        """Put what is held onto each request's output, and forget requests that ended without one."""
        if not self._held:
            return
        for client in outputs.values():
            for output in client.outputs:
                held = self._held.pop(output.request_id, None)
                if held is not None:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), OUTPUT_KEY: held}
        for request_id in [request_id for request_id in self._held if request_id not in live]:
            del self._held[request_id]

    def say(self, request_id: str, reason: str) -> None:
        """Why rows of a request will be missing; travels like a chunk."""
        self._held.setdefault(request_id, []).append(reason)

    @property
    def num_bytes(self) -> int:
        """Bytes of rows held."""
        return sum(len(c.rows) for chunks in self._held.values() for c in chunks if isinstance(c, Chunk))

# SPDX-License-Identifier: Apache-2.0
"""``steering_applied`` is inserted into responses, which otherwise stay unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_steer.server.http.applied_field import AppliedFieldWriter
from vllm_steer.server.http.request_context import RequestContext

APPLIED = {"epoch": 3, "global": None, "modules": [], "request": "sha256:0"}
JSON, STREAM = "application/json", "text/event-stream; charset=utf-8"


async def sent(kind: str, pieces: list[bytes], applied: Any = APPLIED, status: int = 200, **headers: str) -> list[Any]:
    out: list[Any] = []

    async def send(message: Any) -> None:
        out.append(message)

    context = RequestContext(applied_json=None if applied is None else json.dumps(applied).encode())
    stamp = AppliedFieldWriter(context, send)
    fields = {"content-type": kind, **headers}
    if kind == JSON:
        fields["content-length"] = str(len(b"".join(pieces)))
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await stamp.send({"type": "http.response.start", "status": status, "headers": raw})
    for i, piece in enumerate(pieces):
        await stamp.send({"type": "http.response.body", "body": piece, "more_body": i < len(pieces) - 1})
    return out


def body(messages: list[Any]) -> bytes:
    assert messages[0]["type"] == "http.response.start"
    return b"".join(message["body"] for message in messages[1:])


@pytest.mark.parametrize("pieces", [[b'{"a": 1}'], [b"", b'{"a"', b": 1}"], [b"{}"]])
async def test_inserts_the_field_into_json(pieces: list[bytes]) -> None:
    """Catches invalid JSON and a stale content-length."""
    messages = await sent(JSON, pieces)
    assert json.loads(body(messages)) == {"steering_applied": APPLIED, **json.loads(b"".join(pieces))}
    assert dict(messages[0]["headers"])[b"content-length"] == str(len(body(messages))).encode()


@pytest.mark.parametrize(
    "pieces",
    [
        [b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\n', b"data: [DONE]\n\n"],
        [b": ping\n\n", b'event: first\ndata: {"a": 1}\n\ndata: {"a": 2}\n\n', b"data: [DONE]\n\n"],
        [b"data: {}\n\n", b'data: {"a": 2}\n\n'],
    ],
)
async def test_inserts_the_field_into_the_first_event(pieces: list[bytes]) -> None:
    """Catches the field in no event, in every event, or in the wrong line."""
    out = body(await sent(STREAM, pieces))
    events = [json.loads(line[6:]) for line in out.split(b"\n") if line.startswith(b"data: {")]
    assert events[0].pop("steering_applied") == APPLIED
    plain = [json.loads(line[6:]) for line in b"".join(pieces).split(b"\n") if line.startswith(b"data: {")]
    assert events == plain


@pytest.mark.parametrize(
    ("kind", "pieces", "more"),
    [
        (JSON, [b'{"a": 1}'], {"applied": None}),
        (STREAM, [b'data: {"a": 1}\n\n'], {"applied": None}),
        (JSON, [b'{"error": 1}'], {"status": 400}),
        (JSON, [b"[1]"], {}),
        ("audio/wav", [b"{x"], {}),
        (JSON, [b"{\x1f\x8b"], {"content-encoding": "gzip"}),
    ],
)
async def test_leaves_other_responses_unchanged(kind: str, pieces: list[bytes], more: dict[str, Any]) -> None:
    """Catches changes to responses that are not JSON objects, and to responses of plain requests."""
    assert body(await sent(kind, pieces, **more)) == b"".join(pieces)

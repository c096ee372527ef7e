# SPDX-License-Identifier: Apache-2.0
"""``steering_applied`` is inserted into responses, which otherwise stay unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_steer.request import Selector
from vllm_steer.server.http.request_context import Choice, RequestContext
from vllm_steer.server.http.response_writer import ResponseWriter

APPLIED = {"epoch": 3, "global": None, "modules": [], "request": "sha256:0"}
JSON, STREAM = "application/json", "text/event-stream; charset=utf-8"


async def sent(
    kind: str,
    pieces: list[bytes],
    applied: Any = APPLIED,
    status: int = 200,
    context: RequestContext | None = None,
    **headers: str,
) -> list[Any]:
    out: list[Any] = []

    async def send(message: Any) -> None:
        out.append(message)

    async def receive() -> Any:
        raise AssertionError("waits for no disconnect")

    def no_store() -> Any:
        raise AssertionError("stores nothing")

    context = context or RequestContext()
    context.applied_json = None if applied is None else json.dumps(applied).encode()
    stamp = ResponseWriter(context, no_store, receive, send)
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


UNREACHED = {0: (("steering[0]", Selector([[50, None]])), ("steering[1]", Selector("generated"))), 1: (), 2: ()}
NO_EFFECT = [
    {"edit": "steering[0]", "reason": "unreached", "tokens": [[50, None]], "choices": [0]},
    {"edit": "steering[1]", "reason": "unreached", "tokens": "generated", "choices": [0]},
]
DATA = b'data: {"a": 1}\n\n'


async def test_unreached_edits_are_part_of_json() -> None:
    """Catches a digest of edits that changed nothing, without a word about it."""
    early = [{"edit": "steering[2]", "reason": "zero_vector"}]
    context = RequestContext(unreached=dict(UNREACHED))
    document = json.loads(body(await sent(JSON, [b'{"a": 1}'], {**APPLIED, "no_effect": early}, context=context)))
    assert document == {"steering_applied": {**APPLIED, "no_effect": [*early, *NO_EFFECT]}, "a": 1}


@pytest.mark.parametrize(
    ("pieces", "place"),
    [
        ([DATA, b"data: [DONE]\n\n"], "choices"),
        ([DATA, b"data: [DONE]\n\n", b""], "choices"),
        ([DATA, DATA + b"data: [DONE]\n\n", b""], "choices"),
        ([DATA, b'event: response.completed\ndata: {"b": 2}\n\n', b""], "response"),
    ],
)
async def test_unreached_edits_are_in_a_last_event(pieces: list[bytes], place: Any) -> None:
    """Catches a stream without the report, with two of them, or with one behind its end."""
    context = RequestContext(unreached=dict(UNREACHED), fields_applied=True, results_in=place)
    lines = body(await sent(STREAM, pieces, context=context)).decode().split("\n\n")
    at = -3 if place == "choices" else -2
    assert lines[at + 1 :] == (["data: [DONE]", ""] if place == "choices" else [""])
    kind, _, data = lines[at].rpartition("data: ")
    wanted: dict[str, Any] = {"steering_applied": {**APPLIED, "no_effect": NO_EFFECT}}
    wanted |= {"type": "steering_applied"} if place == "response" else {"object": "steering_applied", "choices": []}
    assert json.loads(data) == wanted
    assert kind == ("event: steering_applied\n" if place == "response" else "")
    assert sum("no_effect" in line for line in lines) == 1


@pytest.mark.parametrize("unreached", [{}, {0: ()}])
async def test_streams_end_as_in_vllm_if_all_edits_acted(unreached: dict[int, Any]) -> None:
    """Catches an additional event that no client expects."""
    context = RequestContext(unreached=unreached, fields_applied=True)
    assert body(await sent(STREAM, [DATA, DATA, b"data: [DONE]\n\n"], context=context)).count(b"data: ") == 3


def test_an_edit_that_reached_tokens_in_one_of_several_runs_is_not_reported() -> None:
    """Catches a report about the last run of the model only, with server-side tools."""
    context = RequestContext()
    choice = Choice(context, 0)
    one, two = UNREACHED[0]
    choice.on_reach((one, two))
    choice.on_reach((two,))
    choice.on_reach((one, two))
    assert context.unreached == {0: (two,)}
    context.close()
    choice.on_reach((one,))
    assert context.unreached == {}

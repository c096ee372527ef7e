# SPDX-License-Identifier: Apache-2.0
"""Edits and captures that no token reaches, misspelt fields, and fields of other projects, over HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.requests import LIST
from tests.server.server import HIDDEN, MODEL

PROMPT = "Hello there"
LENGTH = len(PROMPT)  # a token for each byte
LATE = {"decode_steering_vectors": {"post_block": {"1": LIST}}}
PATH = "decode_steering_vectors.post_block[1]"
EDIT = {"kind": "add", "point": "post_block", "layers": 1, "vector": LIST}
CHAT = [{"role": "user", "content": PROMPT}]
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"model": MODEL, "messages": CHAT, "max_tokens": 1}),
    "responses": ("/v1/responses", {"model": MODEL, "input": PROMPT, "max_output_tokens": 1}),
}
routes = pytest.mark.parametrize("name", ROUTES)


def events_of(client: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", route, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


@routes
def test_reports_unreached_edits(name: str, client: httpx.Client) -> None:
    """Catches HTTP 200 with the digest of an edit that changed nothing, and reports on edits that did."""
    route, body = ROUTES[name]
    applied = client.post(route, json={**body, **LATE}).json()["steering_applied"]
    wanted = [{"edit": PATH, "reason": "unreached", "tokens": "generated", "choices": [0]}]
    assert applied["request"].startswith("sha256:")
    assert applied.pop("no_effect") == wanted
    events = events_of(client, route, {**body, **LATE})
    assert events[0]["steering_applied"] == applied
    assert events[-1]["steering_applied"] == {**applied, "no_effect": wanted}
    assert events[-1].get("type" if name == "responses" else "object") == "steering_applied"
    early = {"prefill_steering_vectors": LATE["decode_steering_vectors"]}
    assert "no_effect" not in client.post(route, json={**body, **early}).json()["steering_applied"]
    assert sum("steering_applied" in event for event in events_of(client, route, {**body, **early})) == 1


def test_reports_by_choice(client: httpx.Client) -> None:
    """Catches the choices of one prompt reported for another: the second prompt has a token more."""
    edits = [{**EDIT, "tokens": [[LENGTH, None]]}, {**EDIT, "strength": 0}, {**EDIT, "vector": [0] * HIDDEN}]
    body = {"model": MODEL, "prompt": [PROMPT, PROMPT + "!"], "n": 2, "max_tokens": 2, "steering": edits}
    response = client.post("/v1/completions", json=body)
    assert len(response.json()["choices"]) == 4
    assert response.json()["steering_applied"]["no_effect"] == [
        {"edit": "steering[1]", "reason": "zero_strength"},
        {"edit": "steering[2]", "reason": "zero_vector"},
    ]
    ended = client.post(
        "/v1/completions", json={**body, "prompt": PROMPT, "max_tokens": 8, "stop_token_ids": [*range(256)]}
    )
    assert ended.json()["steering_applied"]["no_effect"][2:] == [
        {"edit": "steering[0]", "reason": "unreached", "tokens": [[LENGTH, None]], "choices": [0, 1]},
    ]


@routes
def test_refuses_positions_out_of_reach(name: str, client: httpx.Client) -> None:
    """Catches a position beyond prompt and max_tokens that is accepted, or refused after the stream has started."""
    route, body = ROUTES[name]
    late = {
        "steering[0].tokens": {"steering": [{**EDIT, "tokens": [200]}]},
        "capture.memory.positions": {"capture": {"memory": {"hooks": {"post_block": [1]}, "positions": [200]}}},
    }
    for path, fields in late.items():
        for stream in (False, True):
            response = client.post(route, json={**body, **fields, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, path)
            assert "position 200 is out of reach: with" in error["message"]


@routes
def test_captures_list_unreached_positions(name: str, client: httpx.Client) -> None:
    """Catches a capture without its rows and without a word about it."""
    route, body = ROUTES[name]
    capture = {"memory": {"hooks": {"post_block": [1]}, "positions": "all_generated"}}
    answer = client.post(route, json={**body, "capture": capture}).json()
    carrier = answer if name == "responses" else answer["choices"][0]
    report = carrier["capture_results"]["memory"]
    ((start, stop),) = report["unreached"]
    assert (report["status"], stop, report["sites"]["post_block"]["1"]["shape"]) == ("ok", None, [0, HIDDEN])
    assert start >= LENGTH


@routes
@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"steer_vectors": {}}, "steer_vectors", "did you mean steering_vectors?"),
        ({"activation_capture": {}}, "activation_capture", "did you mean capture?"),
        ({"output_residual_stream": [3]}, "output_residual_stream", "vllm-lens"),
        ({"vllm_xargs": {"output_residual_stream": "[3]"}}, "vllm_xargs.output_residual_stream", "vllm-lens"),
        ({"extra_args": {"apply_steering_vectors": []}}, "extra_args.apply_steering_vectors", "vllm-lens"),
        ({"vllm_xargs": {"apply_hooks": "gASV"}}, "vllm_xargs.apply_hooks", "code in requests is not run"),
        ({"lora_request": {"lora_name": "oracle"}}, "lora_request", "name the adapter in model"),
    ],
)
def test_refuses_mistakes(fields: dict[str, Any], path: str, words: str, name: str, client: httpx.Client) -> None:
    """Catches HTTP 200 with plain text for a request that was meant to be steered or captured."""
    route, body = ROUTES[name]
    response = client.post(route, json={**body, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, path)
    assert words in error["message"]


def test_the_openai_client_reads_the_last_event(url: str) -> None:
    """Catches an event that breaks a client which knows nothing of it."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chunks = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1, stream=True, extra_body=LATE)  # type: ignore[call-overload]
    received = list(chunks)
    assert received[-1].choices == []
    assert received[-1].model_extra["steering_applied"]["no_effect"][0]["edit"] == PATH
    events = list(client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=1, stream=True, extra_body=LATE))  # type: ignore[call-overload]
    assert "response.completed" in {event.type for event in events} or events[-2].type == "response.incomplete"
    assert events[-1].type == "steering_applied"


def test_other_unknown_fields_pass(client: httpx.Client) -> None:
    """Catches a refusal of what stock vLLM answers."""
    route, body = ROUTES["chat"]
    fields = {"provider": {"order": []}, "enable_thinking": True, "screen_capture": {"fps": 3}, "string": 1}
    response = client.post(route, json={**body, **fields, "vllm_xargs": {"session": "a"}})
    assert response.status_code == 200, response.text

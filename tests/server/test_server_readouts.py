# SPDX-License-Identifier: Apache-2.0
"""Readouts of a real server over HTTP, against products of the rows that the same requests capture."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.docs.markdown import Block
from tests.docs.runner import client_blocks, run_python
from tests.server.server import HIDDEN, MODEL
from tests.server.test_server_capture import CHAT, COMPLETIONS, GREEDY, PROMPT, TOKENS, events_of, rows_of
from vllm_steer import Client
from vllm_steer.client import ServerError

W = (np.random.default_rng(3).standard_normal(HIDDEN) * 0.2).astype(np.float32)
PROBE: dict[str, Any] = {"probe": W.tolist(), "bias": 0.5, "point": "post_block", "layer": 2}
READOUTS: dict[str, Any] = {
    "score": PROBE,
    "sure": {**PROBE, "sigmoid": True},
    "all": {**PROBE, "positions": "all"},
    "two": {"projections": [W.tolist(), (-W).tolist()], "point": "post_block", "layer": 2, "positions": "all"},
}
CAPTURE = {"memory": {"hooks": {"post_block": [2]}, "positions": "all"}}
MESSAGES = [{"role": "user", "content": PROMPT}]


def answer(client: httpx.Client, route: str, **fields: Any) -> dict[str, Any]:
    response = client.post(route, json={**GREEDY, **fields})
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def assert_readouts(found: dict[str, Any], scores: np.ndarray, prompt_len: int, tolerance: float = 1e-3) -> None:
    """Check all readouts against the scores ``x.w + bias`` of all tokens."""
    generated, every = list(range(prompt_len, len(scores))), list(range(len(scores)))
    products = scores - 0.5
    expected = {
        "score": (generated, scores[prompt_len:]),
        "sure": (generated, 0.5 + 0.5 * np.tanh(0.5 * scores[prompt_len:])),
        "all": (every, scores),
        "two": (every, np.stack([products, -products], axis=1)),
    }
    assert list(found) == list(expected)
    for name, (positions, values) in expected.items():
        assert found[name]["positions"] == positions
        np.testing.assert_allclose(found[name]["values"], values, atol=tolerance)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the readouts of the events of a stream."""
    found: dict[str, Any] = {name: {"positions": [], "values": []} for name in READOUTS}
    for part in parts:
        for name, values in part.get("readouts", {}).items():
            found[name]["positions"] += values["positions"]
            found[name]["values"] += values["values"]
    return found


def scores_of(choice: dict[str, Any]) -> np.ndarray:
    """Return ``x.w + bias`` of every captured row."""
    return rows_of(choice["capture_results"]["memory"]["sites"]["post_block"]["2"]) @ W + 0.5


@pytest.mark.feature("OpenAI server", "react")
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_readouts_equal_products_of_captured_rows(client: httpx.Client, route: str) -> None:
    """Catches values of another token, site or request, in a whole response and in its stream."""
    body = {"prompt": PROMPT} if route == COMPLETIONS else {"messages": MESSAGES}
    (choice,) = answer(client, route, **body, readouts=READOUTS, capture=CAPTURE)["choices"]
    scores = scores_of(choice)
    prompt_len = len(scores) + 1 - TOKENS
    assert_readouts(choice["readouts"], scores, prompt_len)
    events = [
        json.loads(e) for e in events_of(client, route, {**GREEDY, **body, "readouts": READOUTS}) if e != "[DONE]"
    ]
    parts = [each for event in events for each in event["choices"]]
    assert_readouts(joined(parts), scores, prompt_len)
    # Values come with the text, not at the end.
    assert sum("readouts" in part for part in parts) >= TOKENS - 1
    assert not [event for event in events if event.get("object") == "readouts"]


def test_responses(client: httpx.Client) -> None:
    """Catches the responses route, streamed or not, without readouts or with other values than chat has."""
    (chat,) = answer(client, CHAT, messages=MESSAGES, capture=CAPTURE)["choices"]
    scores = scores_of(chat)
    prompt_len = len(scores) + 1 - TOKENS
    body = {"model": MODEL, "temperature": 0, "input": PROMPT, "max_output_tokens": TOKENS, "readouts": READOUTS}
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert_readouts(response.json()["readouts"], scores, prompt_len)
    events = [json.loads(event) for event in events_of(client, "/v1/responses", body)]
    assert_readouts(joined(events), scores, prompt_len)
    assert events[-1]["type"] in ("response.completed", "response.incomplete")  # the latter since vLLM 0.33


def test_every_choice_has_its_own_readouts(client: httpx.Client) -> None:
    """Catches readouts attributed to another sample or prompt, in a whole response and in its stream."""
    fields = {"prompt": [PROMPT, "other, and longer"], "n": 2, "temperature": 1, "seed": 1, "readouts": READOUTS}
    choices = answer(client, COMPLETIONS, **fields, capture=CAPTURE)["choices"]
    assert len(choices) == 4
    for place, choice in enumerate(choices):
        assert_readouts(choice["readouts"], scores_of(choice), len(fields["prompt"][place // 2]))
    events = [json.loads(e) for e in events_of(client, COMPLETIONS, {**GREEDY, **fields}) if e != "[DONE]"]
    parts = [each for event in events for each in event["choices"]]
    for number, choice in enumerate(choices):
        prompt_len = len(fields["prompt"][number // 2])
        own = joined([part for part in parts if part["index"] == number])
        # Samples are drawn anew: compare what does not depend on them.
        assert own["all"]["positions"] == list(range(prompt_len + TOKENS - 1))
        np.testing.assert_allclose(own["all"]["values"][:prompt_len], scores_of(choice)[:prompt_len], atol=1e-3)


def test_client_streams_a_probe_of_a_module(url: str) -> None:
    """Catches a client without readouts, and a named probe with other weights."""
    with Client(url) as client:
        deep = {"weights": np.stack([W, -W]), "outputs": [1.0, 0.5], "biases": [0.1, 0.2], "activation": "tanh"}
        registered = client.register("safety", probes={"refusal": W, "deep": deep})
        assert registered.probes == ["deep", "refusal"]
        readouts = {
            "named": {**PROBE, "probe": "safety/refusal"},
            "own": {**PROBE, "probe": W},
            "deep-named": {**PROBE, "probe": "safety/deep"},
            "deep-own": {**PROBE, "probe": deep},
        }
        whole = client.chat(MESSAGES, temperature=0, max_tokens=TOKENS, readouts=readouts).choices[0]
        np.testing.assert_array_equal(whole.readouts["named"].values, whole.readouts["own"].values)
        np.testing.assert_array_equal(whole.readouts["deep-named"].values, whole.readouts["deep-own"].values)
        assert np.abs(whole.readouts["deep-own"].values - whole.readouts["own"].values).min() > 1e-3
        late = {
            "kind": "add",
            "point": "post_block",
            "layers": 3,
            "vector": W,
            "tokens": "generated",
            "when": {"readout": "deep-named", "above": 0.0},
        }
        with pytest.raises(ServerError, match="hidden layer") as caught:
            client.chat(MESSAGES, max_tokens=2, readouts=readouts, steering=[late])
        assert caught.value.param == "steering[0].when.window"
        pieces = list(client.stream_chat(MESSAGES, temperature=0, max_tokens=TOKENS, readouts=readouts))
        assert "".join(piece.text for piece in pieces) == whole.text
        streamed = np.concatenate([piece.readouts["named"].values for piece in pieces if piece.readouts])
        np.testing.assert_allclose(streamed, whole.readouts["named"].values, atol=1e-3)
        assert len(streamed) == TOKENS - 1
        client.delete("safety")


def test_client_examples_of_the_guide(url: str) -> None:
    """Catches an example of the client that no longer runs, and a live strength that cannot be set."""
    before = Block("python", f"weights = vector = {W.tolist()}", 1)
    # Enough tokens for the stream to run on while the client changes the strength.
    asked = [
        replace(
            block,
            code=block.code.replace("http://localhost:8000", url)
            .replace("max_tokens=64", "max_tokens=230")
            .replace("[0.1] * 256", f"[0.1] * {len(W)}"),
        )
        for name in ("readouts", "live")
        for block in client_blocks(f"docs/guides/{name}.md")
    ]
    for attempt in range(5):
        try:
            shown = run_python([before, *asked], "[set(piece.readouts) <= {'refusal'}, len(first.id) > 0]", warm=False)
            break
        except pytest.fail.Exception as error:
            # On a busy machine, the tiny model can finish before the client is scheduled again.
            if "the request has ended" not in str(error) or attempt == 4:
                raise
    assert shown == [True, True]


def test_plain_streams_are_unchanged(client: httpx.Client) -> None:
    """Catches fields in events of requests without readouts."""
    events = events_of(client, COMPLETIONS, {**GREEDY, "prompt": PROMPT})
    assert not any("readouts" in event for event in events)


@pytest.mark.parametrize(
    ("readouts", "param"),
    [
        ({"p": {**PROBE, "layer": 9}}, "readouts.p.layer"),
        ({"p": {**PROBE, "probe": W.tolist()[1:]}}, "readouts.p"),
        ({"p": {**PROBE, "probe": "safety/missing"}}, "readouts.p.probe"),
        ({"p": {**PROBE, "bias": "x"}}, "readouts.p.bias"),
        ({f"p{i}": PROBE for i in range(200)}, "readouts"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused(client: httpx.Client, readouts: dict[str, Any], param: str, stream: bool) -> None:
    """Catches readouts that fail inside the engine, and errors without the field's path."""
    body = {**GREEDY, "prompt": PROMPT, "readouts": readouts, "stream": stream}
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param

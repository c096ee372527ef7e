# SPDX-License-Identifier: Apache-2.0
"""Gates and stops of a real server over HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.server import HIDDEN
from tests.server.test_server_capture import COMPLETIONS, GREEDY, PROMPT, events_of
from tests.server.test_server_readouts import PROBE, answer

PUSH = (np.random.default_rng(5).standard_normal(HIDDEN) * 4).astype(np.float32).tolist()
READOUTS = {"score": PROBE}
NUM_PROMPT = len(PROMPT)


def scores_of_plain(client: httpx.Client) -> list[float]:
    """Return the scores of the generated tokens without gates."""
    (choice,) = answer(client, COMPLETIONS, prompt=PROMPT, readouts=READOUTS)["choices"]
    values: list[float] = choice["readouts"]["score"]["values"]
    return values


def gated(threshold: float) -> list[dict[str, Any]]:
    """Return an edit behind the readout, on while the score is above a threshold."""
    edit = {"kind": "add", "point": "post_block", "layers": 3, "vector": PUSH, "tokens": "generated"}
    return [{**edit, "when": {"readout": "score", "above": threshold}}]


@pytest.mark.feature("OpenAI server", "react")
@pytest.mark.parametrize("stream", [False, True])
def test_trace_has_the_decisions(client: httpx.Client, stream: bool) -> None:
    """Catches a response without the trace, with it twice, or with decisions of other tokens."""
    threshold = float(np.median(scores_of_plain(client))) + 1e-3
    body = {**GREEDY, "prompt": PROMPT, "readouts": READOUTS, "steering": gated(threshold)}
    if stream:
        events = [json.loads(event) for event in events_of(client, COMPLETIONS, body) if event != "[DONE]"]
        parts = [each for event in events for each in event["choices"]]
        (trace,) = [part["steering_trace"] for part in parts if "steering_trace" in part]
        scores = [
            value for part in parts for value in part.get("readouts", {"score": {"values": []}})["score"]["values"]
        ]
    else:
        (choice,) = answer(client, COMPLETIONS, **body)["choices"]
        trace, scores = choice["steering_trace"], choice["readouts"]["score"]["values"]
    assert trace["positions"] == list(range(NUM_PROMPT, NUM_PROMPT + len(scores)))
    assert trace["gates"] == [[float(score > threshold)] for score in scores]
    assert {gate for (gate,) in trace["gates"]} == {0.0, 1.0}


@pytest.mark.feature("OpenAI server", "react")
@pytest.mark.parametrize("stream", [False, True])
def test_stop_ends_the_response(client: httpx.Client, stream: bool) -> None:
    """Catches a stop that is late or unexplained, and the lost value of the token that caused it."""
    scores = scores_of_plain(client)
    highest = int(np.argmax(scores))
    threshold = (sorted(scores)[-2] + scores[highest]) / 2
    stop = [{"readout": "score", "above": threshold}]
    body = {**GREEDY, "prompt": PROMPT, "readouts": READOUTS, "stop_on": stop}
    if stream:
        events = [json.loads(event) for event in events_of(client, COMPLETIONS, body) if event != "[DONE]"]
        parts = [each for event in events for each in event["choices"]]
        last = parts[-1]
        positions = [
            p for part in parts for p in part.get("readouts", {"score": {"positions": []}})["score"]["positions"]
        ]
    else:
        (last,) = answer(client, COMPLETIONS, **body)["choices"]
        positions = last["readouts"]["score"]["positions"]
        np.testing.assert_allclose(last["readouts"]["score"]["values"], scores[: highest + 1], atol=1e-3)
    assert positions == list(range(NUM_PROMPT, NUM_PROMPT + highest + 1))
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"].startswith("readout score is ")
    assert last["stop_reason"].endswith(f"at position {NUM_PROMPT + highest}")


def test_refused_conditions(client: httpx.Client) -> None:
    """Catches conditions that fail inside the engine, and errors without the field's path."""
    for when, param in (
        ([{"readout": "other", "above": 1.0}], "steering[0].when.readout"),
        ({"readout": "score", "above": 1.0, "window": "next"}, "steering[0].when.window"),
        ({"readout": "score"}, "steering[0].when.above"),
    ):
        body = {**GREEDY, "prompt": PROMPT, "readouts": READOUTS, "steering": [{**gated(0.0)[0], "when": when}]}
        response = client.post(COMPLETIONS, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param

# SPDX-License-Identifier: Apache-2.0
"""Parts of the output over HTTP, in chat completions of a real server with a token for each byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.server.server import HIDDEN
from tests.server.test_server_capture import CHAT, GREEDY, PROMPT, events_of
from tests.server.test_server_readouts import PROBE, answer

MESSAGES = [{"role": "user", "content": PROMPT}]
PUSH = (np.random.default_rng(5).standard_normal(HIDDEN) * 4).astype(np.float32).tolist()
TOKENS = 24
BASE: dict[str, Any] = {"messages": MESSAGES, "max_tokens": TOKENS, "return_token_ids": True}
EDIT = {"kind": "add", "point": "post_block", "layers": 3, "vector": PUSH}


@pytest.fixture(scope="module")
def markers(client: httpx.Client, model: Path) -> list[str]:
    """Return the last text of the prompt, which opens a span, and a generated letter that closes it."""
    (choice,) = answer(client, CHAT, **BASE)["choices"]
    letters = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens(choice["token_ids"])
    end = next(letter for letter in letters[3:] if letter.isascii() and letter.isalnum() and letter != ":")
    return [":", end]


def inside(prompt: list[int], generated: list[int], start: int, end: int) -> list[bool]:
    """Return for each forwarded generated token whether it is in the span."""
    opened, found = False, []
    for token in prompt + generated[:-1]:
        before, opened = opened, (opened or token == start) and token != end
        found.append(before or opened)
    return found[len(prompt) :]


def expected_of(client: httpx.Client, model: Path, markers: list[str], **fields: Any) -> tuple[Any, list[int], int]:
    """Return the choice of a request, the positions in the part, and the number of prompt tokens."""
    document = answer(client, CHAT, **BASE, **fields)
    (choice,) = document["choices"]
    prompt, generated = document["prompt_token_ids"], choice["token_ids"]
    start, end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(markers)
    members = inside(prompt, generated, start, end)
    return choice, [len(prompt) + i for i, member in enumerate(members) if member], len(prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_readouts_of_a_part(client: httpx.Client, model: Path, markers: list[str], stream: bool) -> None:
    """Catches values of tokens outside of the part, a prompt that does not open it, and a stream without the values."""
    readouts = {"part": {**PROBE, "positions": {"between": markers}}, "all": PROBE}
    choice, positions, prompt_len = expected_of(client, model, markers, readouts=readouts)
    found = choice["readouts"]
    assert 0 < len(positions) < TOKENS - 1
    if stream:
        body = {**GREEDY, **BASE, "readouts": readouts}
        events = [json.loads(event) for event in events_of(client, CHAT, body) if event != "[DONE]"]
        parts = [each["readouts"] for event in events for each in event["choices"] if "readouts" in each]
        found = {
            name: {key: [item for part in parts for item in part.get(name, {key: []})[key]] for key in found[name]}
            for name in found
        }
    assert found["part"]["positions"] == positions
    values = [found["all"]["values"][position - prompt_len] for position in positions]
    np.testing.assert_allclose(found["part"]["values"], values, atol=1e-3)


@pytest.mark.feature("OpenAI server", "react")
def test_edit_and_stop_in_a_part(client: httpx.Client, model: Path, markers: list[str]) -> None:
    """Catches an edit at tokens of another part than those generated, and a stop at such a token."""
    edit = {**EDIT, "tokens": {"outside": markers}}
    choice, positions, prompt_len = expected_of(client, model, markers, steering=[edit])
    trace = choice["steering_trace"]
    outside = [float(position not in positions) for position in trace["positions"]]
    assert trace["gates"] == [[gate] for gate in outside]
    assert {0.0, 1.0} == set(outside)
    stop = {"readout": "score", "above": -1e6, "positions": {"outside": markers}}
    stopped, inside_of, _ = expected_of(client, model, markers, readouts={"score": PROBE}, stop_on=[stop])
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"].endswith(f"at position {prompt_len + len(inside_of)}")
    assert len(stopped["token_ids"]) == len(inside_of) + 1


def test_a_part_that_never_begins_is_reported(client: httpx.Client) -> None:
    """Catches a digest of edits in the answer although no token was in their part."""
    steering = [{**EDIT, "tokens": {"between": ["\u0001", "\u0002"]}}, {**EDIT, "tokens": "generated"}]
    body = {"messages": MESSAGES, "max_tokens": 3, "logit_bias": {"1": -100}}
    applied = answer(client, CHAT, **body, steering=steering)["steering_applied"]
    (missed,) = applied["no_effect"]
    assert (missed["edit"], missed["reason"], missed["choices"]) == ("steering[0]", "unreached", [0])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ("thinking", "--reasoning-parser"),
        ("tool_call", "--tool-call-parser"),
        ("user", "no special tokens are between the contents of messages"),
        ({"between": ["ab", "c"]}, "is 2 tokens of this model"),
    ],
)
def test_refused(client: httpx.Client, tokens: Any, words: str) -> None:
    """Catches HTTP 200 for a part that the server cannot find, and errors without its path."""
    response = client.post(CHAT, json={**GREEDY, "messages": MESSAGES, "steering": [{**EDIT, "tokens": tokens}]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith("steering[0].tokens")
    assert words in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        (CHAT, {"messages": MESSAGES}),
        ("/v1/responses", {"input": PROMPT}),
    ],
)
def test_refused_before_the_response_starts(client: httpx.Client, route: str, body: Any, stream: bool) -> None:
    """Catches HTTP 200 with an error event, or a stream that ends without one, for a part that cannot be found."""
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    fields = {"readouts": {"r": {**PROBE, "positions": "thinking"}}}
    sent = {"model": GREEDY["model"], "temperature": 0, limit: 4, "stream": stream, **body, **fields}
    response = client.post(route, json=sent)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("readouts.r")

# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve --enable-steering`, over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.server.requests import INVALID_FIELDS, LIST, PACKED, V, at
from tests.server.server import HIDDEN, MODEL

PROMPT = "Hello there"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 8}
STEERED: dict[str, Any] = {"steering_vectors": {"post_block": {"1": LIST}}}


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, "logprobs": 5, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def chat_body(**fields: Any) -> dict[str, Any]:
    return {**GREEDY, "messages": [{"role": "user", "content": PROMPT}], **fields}


def responses_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "max_output_tokens": 8, "input": PROMPT, **fields}


def same_completion(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two completions have the same text with the same probabilities."""
    pairs = (a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"])
    return a["text"] == b["text"] and bool(np.allclose(*pairs, atol=1e-4))


@pytest.fixture(scope="module")
def plain(client: httpx.Client) -> dict[str, Any]:
    return complete(client)


@pytest.fixture(scope="module")
def steered(client: httpx.Client) -> dict[str, Any]:
    return complete(client, **STEERED)


@pytest.mark.feature("OpenAI server", "steer")
def test_a_vector_changes_the_completion(plain: dict[str, Any], steered: dict[str, Any]) -> None:
    """Catches a fluent but unsteered response."""
    assert steered["text"] != plain["text"]
    assert not same_completion(steered, plain)


@pytest.mark.parametrize(
    "fields",
    [
        {"steering_vectors": {"post_block": {"1": PACKED}}},
        {"steering_vectors": {"post_block": {"1": {"vector": PACKED, "scale": 1}}}},
        {"steering_vectors": {"post_block": {"1": {"vector": (V / 4).tolist(), "scale": 4}}}},
        {
            "prefill_steering_vectors": {"post_block": {"1": LIST}},
            "decode_steering_vectors": {"post_block": {"1": PACKED}},
        },
        {"steering_vectors": {"post_block": {"1": (V / 2).tolist()}}, "steering": [
            {"kind": "add", "point": "post_block", "layers": [1], "vector": PACKED, "strength": 0.5}
        ]},
        {"steering": [{"kind": "add", "point": "post_block", "layers": 1, "vector": LIST, "tokens": [[0, None]]}]},
        {"steering_vectors": {"pre_attn": {"2": LIST}}},
    ],
    ids=["packed", "packed and scale", "scale", "prefill and decode", "two halves", "edit", "pre_attn of the next"],
)  # fmt: skip
def test_equivalent_fields_give_the_same_completion(
    fields: dict[str, Any], client: httpx.Client, steered: dict[str, Any]
) -> None:
    """Catches a form that is parsed differently: a dropped scale or phase, or an edit applied twice."""
    assert same_completion(complete(client, **fields), steered)


@pytest.mark.parametrize(
    "fields",
    [
        {"steering_vectors": {"post_block": {"1": {"vector": LIST, "scale": 0}}}},
        {"steering_vectors": {"post_block": {"1": [0] * HIDDEN}}},
        {"steering_vectors": None, "steering": None},
        {"steering": [
            {"kind": "add", "point": "post_block", "layers": 1, "vector": LIST},
            {"kind": "add", "point": "post_block", "layers": 1, "vector": LIST, "strength": -1},
        ]},
    ],
    ids=["scale 0", "zeros", "null", "there and back"],
)  # fmt: skip
def test_zero_steering_changes_nothing(fields: dict[str, Any], client: httpx.Client, plain: dict[str, Any]) -> None:
    """Catches effects other than the effects of the edits."""
    assert same_completion(complete(client, **fields), plain)


def test_prefill_and_decode_phases(client: httpx.Client, plain: dict[str, Any], steered: dict[str, Any]) -> None:
    """Catches swapped phases: only the prompt's edits affect the first token."""
    prefill = complete(client, prefill_steering_vectors=STEERED["steering_vectors"])
    decode = complete(client, decode_steering_vectors=STEERED["steering_vectors"])
    first = [choice["logprobs"]["token_logprobs"][0] for choice in (plain, decode, steered, prefill)]
    assert first[0] == pytest.approx(first[1], abs=1e-4)
    assert first[2] == pytest.approx(first[3], abs=1e-4)
    assert first[0] != pytest.approx(first[2], abs=1e-3)
    assert not same_completion(prefill, steered)
    assert not same_completion(decode, plain)


def streamed(client: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", route, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


def test_streamed_completions(client: httpx.Client, steered: dict[str, Any]) -> None:
    """Catches streams that lose the fields."""
    events = streamed(client, "/v1/completions", {"prompt": PROMPT, **GREEDY, **STEERED})
    assert "".join(event["choices"][0]["text"] for event in events) == steered["text"]


def chat_text(client: httpx.Client, **fields: Any) -> str:
    response = client.post("/v1/chat/completions", json=chat_body(**fields))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_chat(client: httpx.Client) -> None:
    """Catches chat completions, streamed or not, that lose the fields."""
    steered = chat_text(client, **STEERED)
    assert steered != chat_text(client)
    events = streamed(client, "/v1/chat/completions", chat_body(**STEERED))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == steered


def test_chat_batch(client: httpx.Client) -> None:
    """Catches the batch route, which builds its own requests, losing the fields."""
    messages = [[{"role": "user", "content": text}] for text in (PROMPT, "other")]
    response = client.post("/v1/chat/completions/batch", json=chat_body(messages=messages, **STEERED))
    assert response.json()["choices"][0]["message"]["content"] == chat_text(client, **STEERED)


def response_text(client: httpx.Client, **fields: Any) -> str:
    response = client.post("/v1/responses", json=responses_body(**fields))
    assert response.status_code == 200, response.text
    return str(response.json()["output"][0]["content"][0]["text"])


def test_responses(client: httpx.Client) -> None:
    """Catches the responses route, streamed or not, losing the fields."""
    steered = response_text(client, **STEERED)
    assert steered != response_text(client)
    events = streamed(client, "/v1/responses", responses_body(**STEERED))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == steered


def test_invocations(client: httpx.Client, steered: dict[str, Any]) -> None:
    """Catches SageMaker's route, which dispatches to the others, losing the fields."""
    response = client.post("/invocations", json={"prompt": PROMPT, **GREEDY, **STEERED})
    assert response.json()["choices"][0]["text"] == steered["text"]


def test_every_choice_is_steered(client: httpx.Client) -> None:
    """Catches `n` choices of which only the first is steered."""
    body = {"prompt": PROMPT, **GREEDY, "max_tokens": 1, "temperature": 1, "n": 4, "logprobs": 20}
    tops = []
    for fields in ({}, STEERED):
        response = client.post("/v1/completions", json={**body, **fields})
        assert response.status_code == 200, response.text
        tops.append([max(c["logprobs"]["top_logprobs"][0].values()) for c in response.json()["choices"]])
    assert tops[0] == pytest.approx([tops[0][0]] * 4, abs=1e-4)
    assert tops[1] == pytest.approx([tops[1][0]] * 4, abs=1e-4)
    assert tops[0][0] != pytest.approx(tops[1][0], abs=1e-3)


def test_echo_and_prompt_logprobs(client: httpx.Client, plain: dict[str, Any], steered: dict[str, Any]) -> None:
    """Catches prompt probabilities computed without the edits, or taken from a cache."""
    both = [complete(client, echo=True), complete(client, echo=True, **STEERED)]
    for echoed, alone in zip(both, (plain, steered), strict=True):
        assert echoed["text"] == PROMPT + alone["text"]
    of_prompt = [choice["logprobs"]["token_logprobs"][1 : len(PROMPT)] for choice in both]
    assert not np.allclose(of_prompt[0], of_prompt[1], atol=1e-3)


def test_many_prompts(client: httpx.Client, steered: dict[str, Any]) -> None:
    """Catches a list of prompts of which only the first is steered."""
    response = client.post("/v1/completions", json={**GREEDY, **STEERED, "prompt": ["other", PROMPT, PROMPT]})
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert texts[1:] == [steered["text"]] * 2


def test_concurrent_requests_are_independent(
    client: httpx.Client, plain: dict[str, Any], steered: dict[str, Any]
) -> None:
    """Catches a vector applied to another request of the same batch."""
    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(lambda i: complete(client, **(STEERED if i % 2 else {})), range(16)))
    assert [choice["text"] for choice in choices] == [plain["text"], steered["text"]] * 8


def test_the_openai_client(url: str, steered: dict[str, Any]) -> None:
    """Catches fields that OpenAI's client cannot send, and errors that it cannot parse."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    body: Any = {"steering_vectors": {"post_block": {"1": PACKED}}}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=body)
    assert answer.choices[0].text == steered["text"]
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"steering_vectors": {}})
    assert refused.value.param == "steering_vectors"


def post(client: httpx.Client, fields: str, body: dict[str, Any], route: str = "/v1/completions") -> httpx.Response:
    text = f"{json.dumps(body)[:-1]}, {fields}}}"
    return client.post(route, content=text, headers={"content-type": "application/json"})


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == status
    return error


@pytest.mark.parametrize("wrong", INVALID_FIELDS)
def test_refuses_wrong_requests(wrong: str, client: httpx.Client, plain: dict[str, Any]) -> None:
    """Catches ignored errors, streams that start with HTTP 200, and an engine that stops after an error."""
    fields, param, words = INVALID_FIELDS[wrong]
    for stream in (False, True):
        error = refusal(post(client, fields, {"prompt": PROMPT, "stream": stream, **GREEDY}))
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")
        assert words in error["message"]
    assert same_completion(complete(client), plain)


LATE = ["before the prompt", "too narrow", "layer twice", "unknown field"]


@pytest.mark.parametrize("wrong", LATE)
@pytest.mark.parametrize("stream", [False, True])
def test_refuses_wrong_requests_on_every_route(wrong: str, stream: bool, client: httpx.Client) -> None:
    """Catches a route that starts its response before the checks."""
    fields, param, _ = INVALID_FIELDS[wrong]
    for route, body in (("chat/completions", chat_body()), ("responses", responses_body())):
        assert refusal(post(client, fields, {**body, "stream": stream}, f"/v1/{route}"))["param"] == param


def test_refuses_large_bodies(client: httpx.Client, plain: dict[str, Any]) -> None:
    """Catches a limit that is not enforced, or is enforced for plain requests."""
    pad = "x" * (1 << 20)
    error = refusal(post(client, at("1", LIST), {"prompt": PROMPT, "pad": pad, **GREEDY}), 413)
    assert "--steering-max-body-mib" in error["message"]
    assert same_completion(complete(client, pad=pad), plain)


def test_refuses_beam_search_with_fields(client: httpx.Client) -> None:
    """Catches beams without the edits, and beam search refused for plain requests."""
    body = {"prompt": PROMPT, **GREEDY, "use_beam_search": True, "n": 2}
    assert "beam search" in refusal(client.post("/v1/completions", json={**body, **STEERED}))["message"]
    assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("tier", ["base", "prefill", "decode"])
def test_beam_search_under_global_steering(client: httpx.Client, tier: str, steered: dict[str, Any]) -> None:
    """Catches beams that are steered at other tokens than samples are. A single beam is the most likely token each."""
    bodies = {"completions": {"prompt": PROMPT, **GREEDY, "logprobs": 1}, "chat/completions": chat_body(stream=True)}
    assert client.post("/v1/steering/set", json={tier: STEERED["steering_vectors"]}).status_code == 200
    try:
        answers = {
            route: client.post(f"/v1/{route}", json={**body, "use_beam_search": True, "n": 1})
            for route, body in bodies.items()
        }
    finally:
        assert client.post("/v1/steering/clear").status_code == 200
    for answer in answers.values():
        if tier != "base":
            error = refusal(answer)
            assert error["param"] == "use_beam_search" and "global steering" in error["message"]
    if tier == "base":
        assert [answer.status_code for answer in answers.values()] == [200, 200]
        found = answers["completions"].json()
        assert found["choices"][0]["text"] == steered["text"]
        assert found["steering_applied"]["global"]


@pytest.mark.parametrize(
    "route",
    [
        "/inference/v1/generate",
        "/tokenize",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses/render",
    ],
)
def test_refuses_fields_on_unsupported_routes(route: str, client: httpx.Client) -> None:
    """Catches a route that ignores the fields."""
    error = refusal(client.post(route, json={**chat_body(), "prompt": PROMPT, **STEERED}))
    assert error["param"] == "steering_vectors"
    assert route in error["message"]


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({}, 200),
        ({"steering_vectors": {}}, 400),
        ({"extra_args": {"steering": []}}, 400),
        ({"extra_args": {"steer": "x"}}, 400),
    ],
)
def test_refuses_fields_in_raw_sampling_params(params: dict[str, Any], status: int, client: httpx.Client) -> None:
    """Catches unchecked steering in the route that accepts raw sampling parameters."""
    body = {"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, **params}}
    assert client.post("/inference/v1/generate", json=body).status_code == status

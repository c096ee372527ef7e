# SPDX-License-Identifier: Apache-2.0
"""Captures of a real server over HTTP: 16 KiB per response, a store of 1 MiB, expiry after 15 s (``conftest.py``)."""

from __future__ import annotations

import base64
import http.client
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server.server import HIDDEN, LAYERS, MODEL
from vllm_steer.capture.files.reader import open_captures

PROMPT = "Hello there"  # a token for each byte
TOKENS = 8
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS}
SMALL = {"memory": {"hooks": {"post_block": [1, 2]}, "positions": "all_prompt"}}
LARGE = {"memory": {"hooks": dict.fromkeys(("pre_attn", "post_attn", "post_block"), "all"), "positions": "all"}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def choices_of(client: httpx.Client, capture: Any, prompt: Any = PROMPT, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(COMPLETIONS, json={**GREEDY, "prompt": prompt, "capture": capture, **fields})
    assert response.status_code == 200, response.text
    assert int(response.headers["content-length"]) == len(response.content)
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def rows_of(site: dict[str, Any]) -> np.ndarray:
    assert site["dtype"] == "float32"
    return np.frombuffer(base64.b64decode(site["data"]), "<f4").reshape(site["shape"])


def events_of(client: httpx.Client, route: str, body: dict[str, Any]) -> list[str]:
    with client.stream("POST", route, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return [line[6:] for line in response.iter_lines() if line.startswith("data: ")]


@pytest.fixture(scope="module")
def stream_of_prompt(model: Path) -> tuple[torch.Tensor, ...]:
    """Return Transformers' residual stream after each block, ``[tokens, hidden]``, starting with the embedding."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(model)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        states = reference(ids, output_hidden_states=True).hidden_states
    return tuple(state[0] for state in states)


@pytest.mark.feature("OpenAI server", "capture")
def test_small_captures_are_part_of_the_response(
    client: httpx.Client, stream_of_prompt: tuple[torch.Tensor, ...]
) -> None:
    """Catches rows of other sites or positions, a wrong byte order, and small captures sent to the store."""
    (choice,) = choices_of(client, SMALL)
    assert len(choice["text"]) > 0
    result = choice["capture_results"]["memory"]
    assert (result["status"], result["error"]) == ("ok", None)
    assert list(result["sites"]) == ["post_block"]
    assert list(result["sites"]["post_block"]) == ["1", "2"]
    for layer, site in result["sites"]["post_block"].items():
        assert site["positions"] == list(range(len(PROMPT)))
        assert site["shape"] == [len(PROMPT), HIDDEN]
        np.testing.assert_allclose(rows_of(site), stream_of_prompt[int(layer) + 1], atol=1e-3, rtol=1e-3)


def test_captures_change_nothing_else_in_the_response(client: httpx.Client) -> None:
    """Catches changes of the response besides the added field."""
    body = {**GREEDY, "prompt": "héllo 漢字", "logprobs": 3}
    plain, captured = (client.post(COMPLETIONS, json={**body, **extra}).json() for extra in ({}, {"capture": SMALL}))
    for choice in captured["choices"]:
        del choice["capture_results"]
    for answer in (plain, captured):
        del answer["id"], answer["created"]
    assert captured == plain


def test_large_captures_are_fetched(client: httpx.Client, tmp_path: Path) -> None:
    """Catches an id that resolves to other rows, or to a file that the reader cannot open."""
    (choice,) = choices_of(client, LARGE)
    result = choice["capture_results"]["memory"]
    assert result["status"] == "ok"
    assert "sites" not in result
    assert 0 < result["expires_in"] <= 15
    response = client.get(f"/v1/captures/{result['id']}")
    assert response.status_code == 200
    assert len(response.content) == result["bytes"]
    (tmp_path / "fetched.safetensors").write_bytes(response.content)
    (stored,) = open_captures(tmp_path)
    assert len(stored.sites) == 3 * LAYERS
    for site in stored.sites:
        # The last sampled token is never forwarded.
        assert stored.positions(*site).tolist() == list(range(len(PROMPT) + TOKENS - 1))
        assert stored.tensor(*site).shape == (len(PROMPT) + TOKENS - 1, HIDDEN)
    small = choices_of(client, SMALL)[0]["capture_results"]["memory"]["sites"]["post_block"]["1"]
    torch.testing.assert_close(
        stored.tensor("post_block", 1)[: len(PROMPT)], torch.tensor(rows_of(small)), atol=1e-3, rtol=1e-3
    )
    assert client.delete(f"/v1/captures/{result['id']}").status_code == 204
    assert client.get(f"/v1/captures/{result['id']}").status_code == 404
    assert client.delete(f"/v1/captures/{result['id']}").status_code == 404


def test_captures_expire(client: httpx.Client) -> None:
    """Catches captures that never expire, and an unknown id that is a server error."""
    handle = choices_of(client, LARGE)[0]["capture_results"]["memory"]["id"]
    deadline = time.monotonic() + 40
    while client.get(f"/v1/captures/{handle}").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(1)
    for unknown in (handle, "x", "../secret"):
        response = client.get(f"/v1/captures/{unknown}")
        assert response.status_code == 404


@pytest.mark.failure(20)
def test_reports_a_full_store(client: httpx.Client) -> None:
    """Catches a store without a limit, and rows that are silently dropped."""
    prompt = "x" * 150  # 12 sites of 157 rows of 256 bytes: 471 KiB, of which the store has room for two
    results = [choices_of(client, LARGE, prompt)[0]["capture_results"]["memory"] for _ in range(3)]
    assert [result["status"] for result in results] == ["ok", "ok", "error"]
    assert "--capture-store-mib" in results[2]["error"]
    for result in results[:2]:
        assert client.delete(f"/v1/captures/{result['id']}").status_code == 204
    (again,) = choices_of(client, LARGE, prompt)
    assert client.delete(f"/v1/captures/{again['capture_results']['memory']['id']}").status_code == 204


@pytest.mark.failure(18)
def test_every_choice_has_its_own_rows(client: httpx.Client) -> None:
    """Catches results attributed to another sample or prompt, and `n` choices of which only one has results."""
    prompts = [PROMPT, "other, and longer"]
    spec = {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}
    # The same seed for every sample would give the same text: rows could not tell samples apart.
    choices = choices_of(client, spec, prompts, n=2, temperature=1, logprobs=1, return_token_ids=True)
    assert len(choices) == 4
    for place, choice in enumerate(choices):
        prompt = prompts[place // 2]
        site = choice["capture_results"]["memory"]["sites"]["post_block"]["1"]
        length = len(prompt) + len(choice["token_ids"]) - 1
        assert site["positions"] == list(range(length))
        # Running the whole text as a prompt gives the rows that the sample had.
        ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
        (alone,) = choices_of(client, spec, ids, max_tokens=1)
        right = rows_of(alone["capture_results"]["memory"]["sites"]["post_block"]["1"])
        np.testing.assert_allclose(rows_of(site), right[:length], atol=2e-3, rtol=1e-3)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {**GREEDY, "messages": [{"role": "user", "content": PROMPT}], **fields}


def test_chat(client: httpx.Client) -> None:
    """Catches chat completions without their captures."""
    for route, messages in ((CHAT, chat_body()["messages"]), (f"{CHAT}/batch", [chat_body()["messages"]] * 2)):
        response = client.post(route, json=chat_body(messages=messages, capture=SMALL))
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        assert choices
        for choice in choices:
            assert choice["message"]["content"]
            assert choice["capture_results"]["memory"]["sites"]["post_block"]["2"]["shape"][1] == HIDDEN


def test_invocations(client: httpx.Client) -> None:
    """Catches SageMaker's route, which dispatches to the others, losing captures."""
    response = client.post("/invocations", json={**GREEDY, "prompt": PROMPT, "capture": SMALL})
    assert response.json()["choices"][0]["capture_results"]["memory"]["status"] == "ok"


def test_responses(client: httpx.Client) -> None:
    """Catches the responses route, streamed or not, losing captures or returning other rows than chat does."""
    body = {"model": MODEL, "temperature": 0, "input": PROMPT, "max_output_tokens": TOKENS, "capture": SMALL}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response = answer.json()
    assert response["output"]
    chat = client.post(CHAT, json=chat_body(capture=SMALL)).json()["choices"][0]["capture_results"]
    site, right = (found["memory"]["sites"]["post_block"]["2"] for found in (response["capture_results"], chat))
    assert site["positions"] == right["positions"]
    np.testing.assert_allclose(rows_of(site), rows_of(right), atol=1e-3, rtol=1e-3)
    events = [json.loads(event) for event in events_of(client, "/v1/responses", body)]
    assert [event["type"] for event in events[-2:]] == ["response.completed", "capture_results"]
    assert events[-1]["capture_results"]["memory"]["sites"]["post_block"]["2"] == site


@pytest.mark.failure(18)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("usage", [False, True])
def test_streams_end_with_capture_results(route: str, usage: bool, client: httpx.Client) -> None:
    """Catches a stream without the event, with it after the end, or with rows under another index."""
    body = chat_body() if route == CHAT else {**GREEDY, "prompt": [PROMPT, "two"]}
    body |= {"n": 2, "temperature": 1, "capture": SMALL, "stream_options": {"include_usage": usage}}
    events = events_of(client, route, body)
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["object"] == "capture_results"
    count = 2 if route == CHAT else 4
    assert [choice["index"] for choice in last["choices"]] == list(range(count))
    assert all(json.loads(event)["object"] != "capture_results" for event in events[:-2])
    for choice in last["choices"]:
        site = choice["capture_results"]["memory"]["sites"]["post_block"]["2"]
        if route == COMPLETIONS:
            assert site["shape"] == [len((PROMPT, "two")[choice["index"] // 2]), HIDDEN]
    del body["capture"]
    assert "capture_results" not in "".join(events_of(client, route, body))


def test_captures_see_the_requests_edits(client: httpx.Client) -> None:
    """Catches rows read before the request's own edits, or `before` ignored."""
    vector = [3.0] * HIDDEN
    steering = [{"kind": "add", "point": "post_block", "layers": 1, "vector": vector, "tokens": "all"}]
    before, after = (
        choices_of(client, {"memory": {**SMALL["memory"], "before": early}}, steering=steering)[0]
        for early in (True, False)
    )
    rows = [rows_of(c["capture_results"]["memory"]["sites"]["post_block"]["1"]) for c in (before, after)]
    np.testing.assert_allclose(rows[1] - rows[0], np.broadcast_to(3.0, rows[0].shape), atol=2e-3)


def test_capture_to_files(client: httpx.Client, capture_root: Path) -> None:
    """Catches a second consumer that is skipped, and a file reported before it is complete."""
    (choice,) = choices_of(client, {**SMALL, "filesystem": {**SMALL["memory"], "tag": "mine"}})
    results = choice["capture_results"]
    assert results["filesystem"]["status"] == "ok", results
    path = Path(results["filesystem"]["data"]["path"])
    assert path.parent == capture_root
    (stored,) = open_captures(path)
    assert stored.tag == "mine"
    right = rows_of(results["memory"]["sites"]["post_block"]["2"])
    np.testing.assert_array_equal(stored.numpy("post_block", 2), right)


HOOKS = {"hooks": {"post_block": [1]}}
WRONG: dict[str, tuple[Any, str, str]] = {
    "a flag": (True, "capture", "{consumer: spec}"),
    "empty": ({}, "capture", "empty"),
    "unknown consumer": ({"s3": HOOKS}, "capture.s3", "filesystem, memory"),
    "no hooks": ({"memory": {"hooks": {}}}, "capture.memory.hooks", "empty"),
    "unknown point": ({"memory": {"hooks": {"mlp": [1]}}}, "capture.memory.hooks", "post_block"),
    "unknown layer": (
        {"memory": {"hooks": {"pre_attn": [0], "post_block": [1, 9]}}}, "capture.memory.hooks.post_block", "layer 9"
    ),
    "boolean layer": ({"memory": {"hooks": {"post_block": [True]}}}, "capture.memory.hooks.post_block[0]", "layer"),
    "before the prompt": ({"memory": {**HOOKS, "positions": [-500]}}, "capture.memory.positions", "reaches before"),
    "beyond the end": ({"memory": {**HOOKS, "positions": [256]}}, "capture.memory.positions", "max_model_len"),
    "unknown dtype": ({"memory": {**HOOKS, "dtype": "int8"}}, "capture.memory.dtype", "bfloat16"),
    "unknown option": ({"memory": {**HOOKS, "tag": "x"}}, "capture.memory.tag", "nor an option of memory"),
    "pieces": ({"memory": {**HOOKS, "stream": True}}, "capture.memory.stream", "in the last event"),
    "narrow directions": (
        {"memory": {**HOOKS, "reduce": {"directions": [[1.0, 2.0]]}}}, "capture.memory.reduce.directions", "hidden size"
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_refuses_wrong_specs(wrong: str, stream: bool, client: httpx.Client) -> None:
    """Catches an ignored spec, an error without the field's path, and a stream that starts with HTTP 200."""
    capture, param, words = WRONG[wrong]
    for route, body in ((COMPLETIONS, {**GREEDY, "prompt": PROMPT}), (CHAT, chat_body())):
        response = client.post(route, json={**body, "capture": capture, "stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("/v1/responses", {"input": PROMPT, "tools": [{"type": "web_search_preview"}]}, "web_search_preview"),
        ("/tokenize", {"prompt": PROMPT}, "/tokenize"),
        (COMPLETIONS, {"prompt": PROMPT, "use_beam_search": True, "n": 2}, "beam search"),
    ],
)
def test_refuses_captures_without_a_response_to_carry_them(
    route: str, body: dict[str, Any], words: str, client: httpx.Client
) -> None:
    """Catches captures whose results the response cannot carry."""
    response = client.post(route, json={"model": MODEL, **body, "capture": SMALL})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "capture"
    assert words in response.json()["error"]["message"]


def test_refuses_internal_keys(client: httpx.Client) -> None:
    """Catches client data that reaches the decoder of our internal keys."""
    for key in ("steer_capture", "steer_prompt"):
        body = {**GREEDY, "prompt": PROMPT, "vllm_xargs": {key: "x"}}
        response = client.post(COMPLETIONS, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == f"vllm_xargs.{key}"


@pytest.mark.failure(20)
def test_disconnected_clients_free_the_store(client: httpx.Client) -> None:
    """Catches captures kept for disconnected clients, which would fill the store.

    A capture that was complete when the disconnect was detected may stay until it expires.
    """
    prompt = "x" * 150
    long = {"max_tokens": 90, "capture": LARGE}
    for route, body in ((COMPLETIONS, {**GREEDY, "prompt": prompt}), (CHAT, chat_body())):
        for leave_after in (1, 3):
            with client.stream("POST", route, json={**body, **long, "stream": True}) as response:
                for _, line in zip(range(leave_after), response.iter_lines(), strict=False):
                    assert "capture_results" not in line
    leaving = http.client.HTTPConnection(client.base_url.host, client.base_url.port)
    body = {**GREEDY, "prompt": prompt, **long, "n": 8, "temperature": 1}
    leaving.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    time.sleep(0.02)  # so that some of it, at most, is computed
    leaving.close()
    give_up = time.monotonic() + 30
    while True:
        results = [choices_of(client, LARGE, prompt)[0]["capture_results"]["memory"] for _ in range(2)]
        kept = [result for result in results if result["status"] == "ok"]
        for result in kept:
            assert client.delete(f"/v1/captures/{result['id']}").status_code == 204
        if len(kept) == 2:
            break
        assert time.monotonic() < give_up, results
        time.sleep(0.2)

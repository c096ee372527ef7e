# SPDX-License-Identifier: Apache-2.0
"""A real server with two API processes: modules, global steering and ``steering_applied``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from tests.server.registrations import MODULES, register_during_a_kill
from tests.server.requests import LIST, PACKED, V
from tests.server.server import MODEL, run_server

PROMPT = "Hello there"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
SITE = {"post_block": {"1": PACKED}}
PROCESSES = 2
CONNECTIONS = 12
"""Each goes to one of two processes: that all go to the same one happens once in 2,048 times."""


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Iterator[str]]:
    """Return a function that starts the server, each time with the same registry."""
    folder = tmp_path_factory.mktemp("modules")
    save_file({"base.post_block.1": V}, folder / "file.safetensors")
    flags = ["--enable-steering", "--enable-scale-out", "--steering-registry", str(folder / "registry")]
    flags += ["--steering-modules", f"from-file={folder / 'file.safetensors'}"]

    def run(processes: int) -> Iterator[str]:
        count = ["--api-server-count", str(processes)]
        return run_server(model, [*flags, *count], folder / "server.log")

    return run


@pytest.fixture(scope="module")
def url(start: Callable[..., Iterator[str]]) -> Iterator[str]:
    yield from start(processes=PROCESSES)


@pytest.fixture
def clients(url: str) -> Iterator[list[httpx.Client]]:
    """Yield clients with a connection each, so that together they reach both processes."""
    made = [httpx.Client(base_url=url, timeout=60) for _ in range(CONNECTIONS)]
    yield made
    made[0].post("/v1/steering/clear").raise_for_status()
    for client in made:
        client.close()


def answered(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    return answered(client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, "logprobs": 5, **fields}))


def numbers(answer: dict[str, Any]) -> list[float]:
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


def same_completion(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(np.allclose(numbers(a), numbers(b), atol=1e-4))


def test_registered_modules_reach_every_process(clients: list[httpx.Client]) -> None:
    """Catches a process that does not know a module, or uses its previous version, after another has registered it."""
    plain, inline = complete(clients[0]), complete(clients[0], steering_vectors=SITE)
    minus = complete(clients[0], steering_vectors={"post_block": {"1": (-V).tolist()}})
    assert not same_completion(plain, inline) and not same_completion(inline, minus)
    for i, client in enumerate(clients[:6]):
        wanted, vector = (inline, LIST) if i % 2 else (minus, (-V).tolist())
        registered = answered(client.post(MODULES, json={"name": "calm", "base": {"post_block": {"1": vector}}}))
        for other in clients:
            used = complete(other, steering_modules=["calm"])
            assert same_completion(used, wanted)
            assert used["steering_applied"]["modules"][0]["digest"] == registered["digest"]


def test_modules_from_the_command_line(clients: list[httpx.Client]) -> None:
    """Catches a flag that only one process applies."""
    inline = complete(clients[0], steering_vectors={"post_block": {"1": (V / 2).tolist()}})
    assert all(same_completion(complete(client, steering_modules=[["from-file", 0.5]]), inline) for client in clients)


def test_global_steering_reaches_every_process(clients: list[httpx.Client]) -> None:
    """Catches plain requests that one process steers and the other does not, and responses that do not report it."""
    plain, inline = complete(clients[0]), complete(clients[0], steering_vectors=SITE)
    assert "steering_applied" not in plain
    for setter in clients[:4]:
        status = answered(setter.post("/v1/steering/set", json={"base": SITE}))
        for client in clients:
            answer = complete(client)
            assert same_completion(answer, inline)
            assert answer["steering_applied"] == {
                "epoch": status["epoch"], "global": status["digest"], "modules": [], "request": None
            }  # fmt: skip
        cleared = answered(setter.post("/v1/steering/clear"))
        assert cleared["epoch"] == status["epoch"] + 1
        assert all(same_completion(complete(client), plain) for client in clients)


def events(client: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", route, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, **GREEDY}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], **GREEDY}),
    "responses": ("/v1/responses", {"input": PROMPT, "model": MODEL, "temperature": 0, "max_output_tokens": 8}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], **GREEDY}),
}


@pytest.mark.parametrize("name", ROUTES)
def test_every_response_reports_what_was_applied(name: str, clients: list[httpx.Client]) -> None:
    """Catches a route, streamed or not, without `steering_applied`.

    The last route takes no steering fields, but global steering applies to it.
    """
    route, body = ROUTES[name]
    status = answered(clients[0].post("/v1/steering/set", json={"base": SITE}))
    fields: dict[str, Any] = {} if name == "messages" else {"steering_modules": [["from-file", 2]]}
    answer = answered(clients[1].post(route, json={**body, **fields}))
    said = answer["steering_applied"]
    assert (said["epoch"], said["global"]) == (status["epoch"], status["digest"])
    assert [use["scale"] for use in said["modules"]] == ([] if name == "messages" else [2.0])
    streamed = events(clients[2], route, {**body, **fields})
    assert streamed[0].pop("steering_applied") == said
    assert not any("steering_applied" in event for event in streamed)


def test_refuses_unknown_modules_and_forged_reports(clients: list[httpx.Client]) -> None:
    """Catches an ignored reference, a stream that starts with HTTP 200, and a forged `steering_applied`."""
    narrow = {"steering_modules": ["missing"]}
    for stream in (False, True):
        for route, body in list(ROUTES.values())[:3]:
            response = clients[0].post(route, json={**body, **narrow, "stream": stream})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == "steering_modules[0]"
            assert "unknown module 'missing'" in response.json()["error"]["message"]
    forged = {"sampling_params": {"extra_args": {"steer_applied": {"epoch": 1}}, "max_tokens": 1}}
    response = clients[0].post("/inference/v1/generate", json={"model": MODEL, "token_ids": [1, 2], **forged})
    assert response.status_code == 400, response.text


def test_named_probes(clients: list[httpx.Client]) -> None:
    """Catches a projection on other directions than the module's."""
    answered(clients[0].post(MODULES, json={"name": "emotions", "probes": {"joy": LIST}}))
    spec = {"hooks": {"post_block": [1]}, "positions": "last_prompt"}
    rows = []
    for reduce in ({"probes": ["emotions/joy"]}, {"directions": [LIST]}):
        answer = complete(clients[1], capture={"memory": {**spec, "reduce": reduce}})
        rows.append(answer["choices"][0]["capture_results"]["memory"]["sites"]["post_block"]["1"])
    assert rows[0] == rows[1]
    assert rows[0]["shape"] == [1, 1]


def test_the_openai_client(url: str, clients: list[httpx.Client]) -> None:
    """Catches references that OpenAI's client cannot send, and responses that it cannot parse."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    inline = complete(clients[0], steering_vectors=SITE)
    body: Any = {"steering_modules": ["from-file"]}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=body)
    assert answer.choices[0].text == inline["choices"][0]["text"]
    assert answer.model_extra is not None
    assert answer.model_extra["steering_applied"]["modules"][0]["name"] == "from-file"
    chat: Any = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": PROMPT}], max_tokens=8, stream=True, extra_body=body
    )
    assert next(iter(chat)).model_extra["steering_applied"]["modules"][0]["scale"] == 1.0


def test_the_openapi_document(clients: list[httpx.Client]) -> None:
    """Catches routes and fields missing from the OpenAPI document."""
    document = answered(clients[0].get("/openapi.json"))
    assert {MODULES, f"{MODULES}/{{name}}", "/v1/steering/set", "/v1/steering/clear"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest"):
        fields = {key: value for key, value in schemas[name]["properties"].items() if "steering" in key}
        assert {"steering_modules", "steering_vectors", "steering"} <= set(fields)
        assert all(value["description"] for value in fields.values())
    answer = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    applied = set(answer["properties"]["steering_applied"]["properties"])
    assert applied == {"doses", "epoch", "global", "modules", "no_effect", "request"}
    assert "choices" in schemas["NoEffect"]["properties"]


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def descendants(title: bytes) -> list[int]:
    """Return this process's descendants with this title, the most recently started last.

    Ordered by start time, because process ids are reused.
    """
    found, pending = [], children(os.getpid())
    while pending:
        pid = pending.pop()
        with contextlib.suppress(OSError):
            pending += children(pid)
            if title in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append((start_time(pid), pid))
    return [pid for _, pid in sorted(found)]


def start_time(pid: int) -> int:
    """Return a process's start time in clock ticks since boot (proc(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def register_until_killed(url: str, victim: int, seed: int) -> dict[str, str]:
    """Return the digests of the modules that were acknowledged while ``victim`` was killed."""
    acknowledged = register_during_a_kill(
        [url], lambda: os.kill(victim, signal.SIGKILL), each=2000, kill_at=20, seed=seed
    )
    assert len(acknowledged) > 20
    return acknowledged


@pytest.mark.timeout(900)  # three starts of a server
def test_a_killed_server_loses_no_modules(url: str, start: Callable[..., Iterator[str]]) -> None:
    """Catches an acknowledged module that is lost or damaged when a process is killed.

    Kills an API server, and later an engine, during registrations at both API servers. vLLM then stops the whole
    server; the next one with the same registry must have every module, and global steering. The last test of this
    module, because it stops the server.
    """
    assert len(descendants(b"APIServer")) == PROCESSES
    with httpx.Client(base_url=url, timeout=20) as client:
        status = answered(client.post("/v1/steering/set", json={"base": SITE}))
    acknowledged = register_until_killed(url, descendants(b"APIServer")[-1], seed=0)
    for processes, victim in ((PROCESSES, b"EngineCore"), (1, None)):
        for again in start(processes=processes):
            with httpx.Client(base_url=again, timeout=60) as client:
                found = {each["name"]: each for each in answered(client.get(MODULES))["data"]}
                assert dict.fromkeys(found) == {name: each["problem"] for name, each in found.items()}
                # A newer version may have been kept and not yet acknowledged.
                assert not [name for name, digest in acknowledged.items() if digest not in found[name]["versions"]]
                name = "m0.0.3"
                answer = complete(client, steering_modules=[f"{name}@{acknowledged[name]}"])
                assert answer["steering_applied"]["global"] == status["digest"]
                assert answer["steering_applied"]["modules"][0]["digest"] == acknowledged[name]
            if victim is not None:
                acknowledged |= register_until_killed(again, descendants(victim)[-1], seed=1)

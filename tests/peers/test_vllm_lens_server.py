# SPDX-License-Identifier: Apache-2.0
"""The request keys of vllm-lens on a real server, compared with HF Transformers on the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from examples.peers import vllm_lens_http
from tests.peers.adapters import merged
from tests.peers.conftest import forwarded, hidden_states, steered_states
from tests.peers.test_vllm_lens_tensors import read_by_their_client
from tests.server.server import MODEL
from vllm_steer import ServerError
from vllm_steer.peers.vllm_lens import SteeringVector, VLLMLensClient, decode_activations
from vllm_steer.peers.vllm_lens.tensors import decompress

pytestmark = pytest.mark.slow
PROMPT = "steering vectors are added to the residual stream of a layer"  # two chunks of prefill
STREAM = "output_residual_stream"
TOLERANCE = {"atol": 1e-3, "rtol": 1e-3}


@pytest.fixture
def client(url: str) -> Iterator[VLLMLensClient]:
    with VLLMLensClient(f"{url}/v1", model=MODEL) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def post(http: httpx.Client, keys: dict[str, Any], parent: str = "extra_args", **body: Any) -> Any:
    """Complete PROMPT with the request keys."""
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    answer = http.post("/v1/completions", json={**fields, parent: keys, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(hf: Any, tokens: list[int], layers: list[int]) -> torch.Tensor:
    """Return the outputs of layers; HF's last entry is behind the final norm, so the last layer is left out."""
    states = hidden_states(hf, tokens)
    return torch.stack([states[layer + 1] for layer in layers])


@pytest.mark.parametrize("parent", ["extra_args", "vllm_xargs"])
@pytest.mark.parametrize("value", [[2, 0], "[2, 0]"])
def test_the_stream_is_that_of_hf(http: httpx.Client, hf: Any, parent: str, value: Any) -> None:
    """Catches another layer or order, lost rows of generated tokens, and JSON texts that are not read."""
    document = post(http, {STREAM: value}, parent)
    stream = decode_activations(document["activations"])["residual_stream"]
    torch.testing.assert_close(stream, expected(hf, forwarded(document["choices"][0]), [0, 2]), **TOLERANCE)
    assert stream.dtype == torch.float32
    assert "capture_results" not in document["choices"][0]


def test_true_captures_all_layers_and_false_none(http: httpx.Client, hf: Any) -> None:
    """Catches False served as all layers, and rows too large for a response that are lost."""
    document = post(http, {STREAM: True})
    stream = decode_activations(document["activations"])["residual_stream"]
    assert stream.shape == (4, len(PROMPT) + 2, 64)
    torch.testing.assert_close(stream[:3], expected(hf, forwarded(document["choices"][0]), [0, 1, 2]), **TOLERANCE)
    assert "activations" not in post(http, {STREAM: False})


def test_binary_transport(http: httpx.Client, client: VLLMLensClient) -> None:
    """Catches a handle to other rows, headers that do not describe them, and bytes that are not zstd."""
    inline = decode_activations(post(http, {STREAM: True})["activations"])["residual_stream"]
    answer = post(http, {STREAM: True, "activations_transport": "binary"})
    handle = answer["activations"]["residual_stream"]["handle"]
    response = http.get(f"/v1/activations/{handle}")
    headers = {name: response.headers[f"X-VLLM-Lens-{name}"] for name in ("Dtype", "Shape", "Compression")}
    assert headers == {"Dtype": "float32", "Shape": json.dumps(list(inline.shape)), "Compression": "zstd"}
    raw = decompress(response.content, inline.nbytes, "activations")
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(inline.shape), inline)
    assert torch.equal(read_by_their_client(answer["activations"]["residual_stream"], response.content), inline)
    assert torch.equal(client.generate(PROMPT, 3, capture_layers=True).activations["residual_stream"], inline)
    small = client.generate("one", 1, capture_layers=[1]).activations["residual_stream"]
    assert small.shape == (1, 3, 64)
    missing = http.get("/v1/activations/0000")
    assert missing.status_code == 404


@pytest.mark.parametrize("transport", ["base64", "binary"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_streams_end_with_activations(http: httpx.Client, client: VLLMLensClient, route: str, transport: str) -> None:
    """Catches streams that lose their activations, and events that wait for the end of the stream."""
    given: dict[str, Any] = {"prompt": PROMPT} if route == "/v1/completions" else {}
    given = given or {"messages": [{"role": "user", "content": PROMPT}]}
    body = {"model": MODEL, "max_tokens": 3, "temperature": 0, **given}
    body["extra_args"] = {STREAM: True, "activations_transport": transport}
    for _ in range(5):  # on a busy machine several tokens may come in one event
        with http.stream("POST", route, json={**body, "stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        *pieces, last = map(json.loads, lines[:-1])
        assert last["object"] == "activations"
        if len(pieces) >= 3:
            break
    assert len(pieces) >= 3
    assert not any("activations" in piece for piece in pieces)
    found = last["activations"]["residual_stream"]
    stream = client.fetch(found["handle"]) if transport == "binary" else decode_activations(last["activations"])
    stream = stream if isinstance(stream, torch.Tensor) else stream["residual_stream"]
    body["extra_args"]["activations_transport"] = "base64"
    whole = http.post(route, json=body).json()
    assert torch.equal(stream, decode_activations(whole["activations"])["residual_stream"])


def test_vectors_at_every_token(client: VLLMLensClient, hf: Any) -> None:
    """Catches a vector at another layer, without its scale, or at prompt tokens only."""
    row = torch.randn(64, generator=torch.Generator().manual_seed(0))
    vector = SteeringVector(activations=row[None], layer_indices=[1], scale=3.0)
    answer = client.generate(PROMPT, 3, capture_layers=[1, 2], steering_vectors=vector, return_token_ids=True)
    tokens = forwarded(answer.document["choices"][0])
    states = steered_states(hf, tokens, 1, dict.fromkeys(range(len(tokens)), 3.0 * row), norm_match=False)
    torch.testing.assert_close(answer.activations["residual_stream"], torch.stack(states[2:4]), **TOLERANCE)


@pytest.mark.parametrize("positions", [[50, 3, 40], None])
def test_norm_matched_vectors_at_positions(client: VLLMLensClient, hf: Any, positions: list[int] | None) -> None:
    """Catches positions that count from the start of a chunk of the prefill, and norms of another row."""
    rows = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))
    vector = SteeringVector(activations=rows, layer_indices=[1], norm_match=True, position_indices=positions)
    answer = client.generate(PROMPT, 1, capture_layers=[1, 2], steering_vectors=vector, return_token_ids=True)
    tokens = forwarded(answer.document["choices"][0])
    placed = dict(zip(positions or range(3), rows[0], strict=True))
    states = steered_states(hf, tokens, 1, placed, norm_match=True)
    torch.testing.assert_close(answer.activations["residual_stream"], torch.stack(states[2:4]), **TOLERANCE)


def test_oracles_in_one_batch(url: str, adapters: dict[str, Path], model_path: Path) -> None:
    """Catches an adapter or injected rows of another request, and rows injected at other tokens."""
    question = "? ? what do these mean, in a few words?"
    rows = torch.randn(4, 1, 2, 64, generator=torch.Generator().manual_seed(2))
    names = ["oracle", "other", "oracle", MODEL]

    def ask(i: int) -> Any:
        vector = SteeringVector(
            activations=rows[i], layer_indices=[1], norm_match=True, scale=2.0, position_indices=[0, 2]
        )
        with VLLMLensClient(url, model=MODEL) as client:
            more = {"lora_request": {"lora_name": names[i]}, "return_token_ids": True}
            return client.generate(question, 3, capture_layers=[0, 1, 2], steering_vectors=[vector], **more)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    for name, row, answer in zip(names, rows, answers, strict=True):
        hf = merged(model_path, adapters.get(name))
        placed = dict(zip((0, 2), row[0], strict=True))
        tokens = forwarded(answer.document["choices"][0])
        states = steered_states(hf, tokens, 1, placed, norm_match=True, scale=2.0)
        torch.testing.assert_close(answer.activations["residual_stream"], torch.stack(states[1:4]), **TOLERANCE)
        assert answer.document["model"] == name


def test_each_sample_has_its_activations(http: httpx.Client, hf: Any) -> None:
    """Catches one sample's rows in another's choice."""
    # No seed: vLLM's CPU runner cannot continue a seeded request behind a chunk of its prefill.
    keys = {STREAM: [1], "skip_reading_prefix_cache": True}
    document = post(http, keys, n=2, temperature=2.0, max_tokens=8)
    first, second = document["choices"]
    prompt = first["prompt_token_ids"]
    for choice in (first, second):
        stream = decode_activations(choice["activations"])["residual_stream"]
        torch.testing.assert_close(stream, expected(hf, forwarded(choice, prompt), [1]), **TOLERANCE)


@pytest.mark.parametrize(
    ("body", "field", "problem"),
    [
        ({"extra_args": {STREAM: 3}}, f"extra_args.{STREAM}", "true or a list"),
        ({"vllm_xargs": {STREAM: [4]}}, "capture.memory.hooks.post_block", "layers 0 to 3"),
        ({"extra_args": {"output_qk": True}}, "extra_args.output_qk", "capture attn_out"),
        ({"vllm_xargs": {"apply_hooks": '["gASV"]'}}, "vllm_xargs.apply_hooks", "pickled code is not run; use capture"),
        ({"lora_request": {"lora_name": "a", "lora_path": "/x"}}, "lora_request", "--lora-modules"),
        ({STREAM: [1]}, STREAM, "is a field of vllm-lens"),
        ({"apply_hooks": ["gASV"]}, "apply_hooks", "code in requests is not run"),
        ({"extra_body": {"apply_steering_vectors": []}}, "extra_body.apply_steering_vectors", "field of vllm-lens"),
    ],
)
def test_refusals_name_the_key(http: httpx.Client, body: dict[str, Any], field: str, problem: str) -> None:
    """Catches keys that are ignored, layers that vanish silently, and refusals that do not name the key."""
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "one", "max_tokens": 1, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert problem in error["message"]


def test_hooks_cannot_be_registered(http: httpx.Client) -> None:
    """Catches a route that takes pickled code."""
    answer = http.post("/v1/hooks/register", json={"hook": "gASV"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "apply_hooks")


def test_the_client_reports_refusals(client: VLLMLensClient) -> None:
    """Catches an answer of the model for an adapter that does not exist."""
    with pytest.raises(ServerError) as caught:
        client.generate("one", 1, lora_request={"lora_name": "missing"})
    assert caught.value.status == 404


def test_the_example_runs(url: str) -> None:
    """Catches an example that no longer runs, and a vector without effect."""
    shown = vllm_lens_http.run(url)
    assert shown["shape"] == (1, len("Once upon a time") + 3, 64)
    assert shown["plain"] != shown["steered"]
    assert shown["chat"] == 4

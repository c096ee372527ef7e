# SPDX-License-Identifier: Apache-2.0
"""The interface of vllm-lens: request keys, tensors, outputs, and the HTTP middleware."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from tests.peers.conftest import hidden_states
from vllm_steer import SteeringError
from vllm_steer.peers.vllm_lens import (
    SamplingParams,
    SteeringVector,
    VLLMLensClient,
    activations_of,
    decode_activations,
    serialize_tensor,
)
from vllm_steer.peers.vllm_lens.http import VllmLensMiddleware
from vllm_steer.peers.vllm_lens.keys import read_keys

VECTOR = SteeringVector(activations=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), layer_indices=[1, 2], scale=2.0)


def test_vectors_become_edits() -> None:
    """Catches another point, swapped layers, and positions that are counted wrongly."""
    first, second = VECTOR.edits()
    assert (first.kind, first.point, first.layers, first.strength) == ("add", "post_block", (1,), 2.0)
    assert second.vector.tolist() == [3.0, 4.0]
    assert second.tokens.to_wire() == "all"
    oracle = SteeringVector(
        activations=torch.ones(1, 2, 4), layer_indices=[3], norm_match=True, position_indices=[7, 2]
    )
    assert [edit.tokens.to_wire() for edit in oracle.edits()] == [[7], [2]]
    assert {edit.kind for edit in oracle.edits()} == {"add_normed"}
    without = SteeringVector(activations=torch.ones(1, 2, 4), layer_indices=[3])
    assert [edit.tokens.to_wire() for edit in without.edits()] == [[0], [1]]


@pytest.mark.parametrize(
    ("keys", "field", "problem"),
    [
        ({"output_residual_stream": 3}, "output_residual_stream", "true or a list"),
        ({"output_residual_stream": []}, "output_residual_stream", "true or a list"),
        ({"output_residual_stream": "[3"}, "output_residual_stream", "not valid JSON"),
        ({"output_qk": True}, "output_qk", "cannot be captured"),
        ({"apply_hooks": "gASV"}, "apply_hooks", "not valid JSON"),
        ({"apply_hooks": ["gASV"]}, "apply_hooks", "pickled code is not run"),
        ({"activations_transport": "ftp"}, "activations_transport", "must be base64 or binary"),
        ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache", "true or false"),
        ({"apply_steering_vectors": 1}, "apply_steering_vectors", "must be a list"),
        ({"apply_steering_vectors": [{"layer_indices": [1]}]}, r"apply_steering_vectors\[0\].activations", "required"),
    ],
)
def test_invalid_keys_are_refused(keys: dict[str, Any], field: str, problem: str) -> None:
    """Catches a key that is ignored or taken for something else."""
    with pytest.raises(SteeringError, match=rf"extra_args\.{field}: .*{problem}"):
        SamplingParams(extra_args=keys)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"layer_indices": [1, 2]}, "layer_indices", "names 2 layers"),
        ({"activations": [[1.0], [2.0]], "layer_indices": [3, 3]}, "layer_indices", "names layer 3 more than once"),
        ({"position_indices": [0]}, "position_indices", "2-D vector is added at every token"),
        ({"activations": [[0.0]], "norm_match": True}, "activations", "is zero"),
        ({"layer_indices": [-1]}, "layer_indices", "count from 0"),
    ],
)
def test_invalid_vectors_are_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    """Catches a vector that is ignored or added elsewhere."""
    vectors = [{"activations": [[1.0]], "layer_indices": [1], **changes}]
    with pytest.raises(SteeringError, match=rf"extra_args\.apply_steering_vectors\[0\]\.{field}: .*{problem}"):
        SamplingParams(extra_args={"apply_steering_vectors": vectors})


def vector(*positions: int, layers: tuple[int, ...] = (1,), norm_match: bool = True) -> SteeringVector:
    """Return a vector for some positions, or for all tokens."""
    shape = (len(layers), len(positions), 2) if positions else (len(layers), 2)
    return SteeringVector(
        activations=torch.ones(shape), layer_indices=list(layers), norm_match=norm_match,
        position_indices=list(positions) or None,
    )  # fmt: skip


PLAIN = vector(2, norm_match=False)


@pytest.mark.parametrize(
    ("vectors", "refused"),
    [
        ([vector(2), vector(3, 2)], 1),
        ([vector(), vector(0)], 1),
        ([vector(2, layers=(3, 1)), vector(4), vector(layers=(0, 1))], 2),
        ([PLAIN, vector(2)], 1),
        ([PLAIN, vector()], 1),
        ([vector(2), PLAIN, PLAIN], None),
        ([vector(2), vector(3)], None),
        ([PLAIN, vector(3), vector(layers=(2,)), vector(layers=(0,))], None),
    ],
)
def test_the_norm_to_match_is_unique(vectors: list[SteeringVector], refused: int | None) -> None:
    """Catches a vector scaled to the norm after another one, where vllm-lens takes the norm before both."""
    if refused is None:
        edits = read_keys({"apply_steering_vectors": vectors}, "extra_args").edits
        assert len(edits) == sum(len(each.edits()) for each in vectors)
        return
    with pytest.raises(SteeringError, match=rf"extra_args\.apply_steering_vectors\[{refused}\]\.norm_match"):
        read_keys({"apply_steering_vectors": vectors}, "extra_args")


def test_false_captures_nothing() -> None:
    """Catches ``output_residual_stream=False`` served as all layers."""
    assert read_keys({"output_residual_stream": False}, "extra_args").capture is None
    assert SamplingParams(extra_args={"output_residual_stream": False}).extra_args is None


def test_other_keys_stay() -> None:
    """Catches keys of other plugins that are dropped, and a capture that replaces the caller's."""
    assert SamplingParams(extra_args={"mine": 1, "output_residual_stream": False}).extra_args == {"mine": 1}
    with pytest.raises(SteeringError, match=r"conflicts with capture\.memory"):
        SamplingParams(capture={"memory": {"hooks": {"pre_attn": 0}}}, extra_args={"output_residual_stream": [1]})


@pytest.mark.slow
def test_activations_are_those_of_hf(engine: Any, hf: Any) -> None:
    """Catches another layer, another order of layers, and lost rows of generated tokens."""
    params = SamplingParams(max_tokens=3, temperature=0, extra_args={"output_residual_stream": [2, 0]})
    plain = SamplingParams(max_tokens=2, temperature=0)
    output, other = engine.generate(["steering", "one"], [params, plain], use_tqdm=False)
    assert activations_of(other) is None
    found = activations_of(output)
    assert found is not None
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    assert found["residual_stream"].shape == (2, len(tokens) - 1, 64)
    states = hidden_states(hf, tokens[:-1])
    torch.testing.assert_close(found["residual_stream"], torch.stack([states[1], states[3]]), atol=1e-3, rtol=1e-3)


def injecting(rows: torch.Tensor, positions: list[int], layers: list[int], **settings: Any) -> SamplingParams:
    """Return parameters that add rows, scaled to the stream's norm, after layer 1, and that capture layers."""
    vector = SteeringVector(
        activations=rows, layer_indices=[1], norm_match=True, position_indices=positions, **settings
    )  # fmt: skip
    keys = {"output_residual_stream": layers, "apply_steering_vectors": [vector]}
    return SamplingParams(max_tokens=2, temperature=0, extra_args=keys)


@pytest.mark.slow
def test_an_oracle_reads_injected_activations(engine: Any, hf: Any) -> None:
    """Catches norm-matched vectors at other positions, and one request's vectors in another of the batch."""
    vectors = torch.randn(2, 1, 2, 64, generator=torch.Generator().manual_seed(0))
    requests = [injecting(each, [3, 1], [1], scale=0.5) for each in vectors]
    outputs = engine.generate(["what is ??", "what is ?"], requests, use_tqdm=False)
    for output, each in zip(outputs, vectors, strict=True):
        found = activations_of(output)
        assert found is not None
        prompt = len(output.prompt_token_ids)
        plain = hidden_states(hf, list(output.prompt_token_ids))[2]
        expected = plain.clone()
        for position, vector in zip((3, 1), each[0], strict=True):
            expected[position] += 0.5 * plain[position].norm() * vector / vector.norm()
        torch.testing.assert_close(found["residual_stream"][0, :prompt], expected, atol=1e-3, rtol=1e-3)


def application() -> FastAPI:
    """Return an application that answers with the body that it received, as a server with captures does."""
    app = FastAPI()

    async def answer(request: Request) -> Any:
        body = await request.json()
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length"}
        if "capture" in body:
            rows = torch.arange(6.0).reshape(3, 2)
            site = {**serialize_tensor(rows, compression=None), "positions": [0, 1, 2]}
            site = {key: site[key] for key in ("dtype", "shape", "data", "positions")}
            layers = {"3": site, "1": site} if body["prompt"] == "two" else {"1": site}
            choice["capture_results"] = {"memory": {"status": "ok", "error": None, "sites": {"post_block": layers}}}
        return {"choices": [choice], "received": body}

    app.post("/v1/completions")(answer)
    return app


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    pytest.importorskip("zstandard")
    app = application()
    app.add_middleware(VllmLensMiddleware)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.mark.parametrize("parent", ["extra_args", "vllm_xargs"])
async def test_http_keys_are_translated(http: httpx.AsyncClient, parent: str) -> None:
    """Catches keys that reach the server untranslated, JSON texts that are not read, and rows at another place."""
    keys = {"output_residual_stream": "[3, 1]", "apply_steering_vectors": json.dumps([VECTOR.model_dump()])}
    body = {"prompt": "two", "max_tokens": 2, parent: keys, "lora_request": {"lora_name": "oracle"}}
    answer = (await http.post("/v1/completions", json=body)).json()
    received = answer["received"]
    assert received["capture"]["memory"] == {"hooks": {"post_block": [3, 1]}, "positions": "all"}
    assert [edit["layers"] for edit in received["steering"]] == [[1], [2]]
    assert parent not in received
    assert received["model"] == "oracle"
    stream = decode_activations(answer["activations"])["residual_stream"]
    assert stream.shape == (2, 3, 2)
    assert "capture_results" not in answer["choices"][0]


async def test_http_refusals(http: httpx.AsyncClient) -> None:
    """Catches refusals without status 400, without the field, or with the model run."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"extra_args": {"apply_hooks": ["x"]}}, "extra_args.apply_hooks"),
        ({"lora_request": {"lora_name": "a", "lora_path": "/etc"}}, "lora_request"),
    ]
    for body, field in cases:
        answer = await http.post("/v1/completions", json={"prompt": "x", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    answer = await http.post("/v1/hooks/register", json={})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "apply_hooks")


async def test_a_stored_capture_does_not_hang_the_server() -> None:
    """Catches a request for stored rows that never pauses: the server would answer nothing more."""
    pytest.importorskip("zstandard")
    app = FastAPI()

    async def stored() -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            await asyncio.sleep(0)
            yield b"not a capture file"

        return StreamingResponse(chunks(), status_code=404)

    app.get("/v1/captures/{name}")(stored)
    app.add_middleware(VllmLensMiddleware)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        answer = await client.get("/v1/activations/abc")
    assert (answer.status_code, answer.content) == (404, b"not a capture file")


async def test_other_bodies_are_not_touched(http: httpx.AsyncClient) -> None:
    """Catches a body without the keys that is changed."""
    body = {"prompt": "x", "extra_args": {"mine": 1}}
    assert (await http.post("/v1/completions", json=body)).json()["received"] == body


def test_client_reads_the_tensors() -> None:
    """Catches a request with other keys, and a handle that is not fetched."""
    zstandard = pytest.importorskip("zstandard")
    rows = torch.arange(6.0).reshape(1, 3, 2).to(torch.bfloat16)

    def serve(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            headers = {"x-vllm-lens-original-dtype": "bfloat16", "x-vllm-lens-shape": "[1, 3, 2]"}
            data = rows.view(torch.int16).numpy().tobytes()
            headers["x-vllm-lens-bytes"] = str(len(data))
            return httpx.Response(200, headers=headers, content=zstandard.compress(data))
        extra = json.loads(request.content)["extra_args"]
        assert extra["output_residual_stream"] == [1]
        assert extra["apply_steering_vectors"][0]["layer_indices"] == [1, 2]
        stream = {"handle": "abc"}
        return httpx.Response(200, json={"choices": [{"text": "x"}], "activations": {"residual_stream": stream}})

    client = VLLMLensClient("http://server/v1", model="m", transport=httpx.MockTransport(serve))
    answer = client.generate("one", capture_layers=[1], steering_vectors=VECTOR)
    assert torch.equal(answer.activations["residual_stream"], rows)
    transports: list[str] = []

    def answered(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert "activations_transport" not in body
        transports.append(body["extra_args"]["activations_transport"])
        return httpx.Response(200, json={"choices": [{"text": "x"}]})

    plain = VLLMLensClient("http://server/v1", model="m", transport=httpx.MockTransport(answered))
    plain.generate("one", capture_layers=[1])
    plain.chat([], capture_layers=[1], activations_transport="base64")
    assert transports == ["binary", "base64"]
    for refused in (lambda: plain.generate("one", hooks=[1]), lambda: plain.chat([], capture_qk=[1])):
        with pytest.raises(SteeringError):
            refused()
    with pytest.raises(SteeringError, match="a server runs no code"):
        plain.register_hooks([])
    with pytest.raises(SteeringError, match="user hooks"):
        from vllm_steer.peers.vllm_lens import Hook  # noqa: F401
    assert not hasattr(plain, "nonsense")


def test_client_sends_arrays() -> None:
    """Catches a ``TypeError`` for tokens and layers that are given as arrays."""
    bodies: list[Any] = []

    def serve(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [{"text": "x"}]})

    client = VLLMLensClient("http://server/v1", model="m", transport=httpx.MockTransport(serve))
    client.generate(torch.tensor([5, 6]), capture_layers=np.array([1, 3]))
    assert bodies[0]["prompt"] == [5, 6]
    assert bodies[0]["extra_args"]["output_residual_stream"] == [1, 3]


def test_the_transport_is_read_from_json() -> None:
    """Catches a JSON text that is not read."""
    assert read_keys({"activations_transport": '"binary"'}, "extra_args").binary


@pytest.mark.parametrize("mask", [[0, 0, 1], [1, 1, 0], [True, False, True], [False, True, False]], ids=str)
def test_masks_are_no_positions(mask: list[Any]) -> None:
    """Catches a mask that adds a vector at the positions 0 and 1."""
    with pytest.raises((SteeringError, ValueError), match="for a mask, list the numbers of its entries"):
        SteeringVector(activations=torch.ones(1, 3, 4), layer_indices=[1], position_indices=mask).edits()

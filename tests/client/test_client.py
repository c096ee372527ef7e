# SPDX-License-Identifier: Apache-2.0
"""The clients: requests, parsed responses and retries."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI

from tests.registry.modules import content, module, vector
from vllm_steer import AsyncClient, Client, Edit, ServerError, SteeringError
from vllm_steer.capture.readouts import Readouts, SteeringTrace
from vllm_steer.capture.results import SiteRows
from vllm_steer.client import ReadoutValues, Retry, Rows, Trace
from vllm_steer.client.encoding import to_json
from vllm_steer.client.responses import CaptureAnswer, parse_completion, parse_piece
from vllm_steer.registry.module_files import write_module
from vllm_steer.registry.schema import SteeringApplied

FAST_RETRY = Retry(attempts=3, first=0.0)


def test_modules_and_global_steering(url: str, tmp_path: Path) -> None:
    """Catches a method that calls another endpoint, and vectors changed on the way."""
    given = {key: value for key, value in content().items() if key != "edits"}
    edits = [Edit(kind="ablate", point="post_block", layers="all", vector=vector(4)), content()["edits"][1]]
    (tmp_path / "calm.safetensors").write_bytes(write_module(module()))
    with Client(url) as client:
        info = client.register("calm", **given, edits=edits, description="d")
        assert (info.digest, info.description, info.epoch) == (module().digest, "d", 1)
        assert client.register_file("file", tmp_path / "calm.safetensors").digest == info.digest
        assert client.register_file("bytes", write_module(module())).digest == info.digest
        tensors = {"post_block": {1: torch.from_numpy(vector(1)), 2: vector(1).astype(np.float64)}}
        calmer = client.register("calm", base=tensors)
        assert [each.name for each in client.list().data] == ["bytes", "calm", "file"]
        assert client.get(f"calm@{info.digest}", data=True).content.data == module().to_wire()
        assert client.get("calm").versions == [info.digest, calmer.digest]
        status = client.set(modules=[("calm", 2.0)], base=tensors, replace=True)
        assert [(use.digest, use.scale) for use in status.modules] == [(calmer.digest, 2.0)]
        assert client.status() == status
        assert client.status(data=True).content.data is not None
        assert client.delete("calm").deleted == [info.digest, calmer.digest]
        assert client.clear().digest is None


def test_readouts_are_parsed() -> None:
    """Catches values under another position, numbers that are not finite, and the trace of another choice."""
    choice = {
        "index": 0,
        "text": "a",
        "finish_reason": "stop",
        "stop_reason": "readout p is 0.9 at position 4",
        "readouts": {"p": {"positions": [3, 4], "values": [0.5, None]}, "q": {"positions": [3], "values": [[1, 2]]}},
        "steering_trace": {"positions": [3, 4], "gates": [[1, 0], [0, 1]], "live": {"calm": [1, 0.5]}},
    }
    other = {**choice, "index": 1, "readouts": {}, "steering_trace": None}
    for parsed in (parse_completion({"choices": [choice, other]}).choices[0], parse_piece({"choices": [choice]})):
        assert parsed.readouts["p"].positions.tolist() == [3, 4]
        assert parsed.readouts["p"].values[0] == 0.5 and np.isnan(parsed.readouts["p"].values[1])
        assert parsed.readouts["q"].values.tolist() == [[1.0, 2.0]]
        assert parsed.trace is not None and parsed.trace.gates.tolist() == [[1.0, 0.0], [0.0, 1.0]]
        assert parsed.trace.live["calm"].tolist() == [1.0, 0.5]
        assert parsed.trace.controller_error is None
    uncontrolled = {**choice["steering_trace"], "controller_error": "the controller pi has failed"}
    trace = parse_piece({"choices": [{**choice, "steering_trace": uncontrolled}]}).trace
    assert trace is not None and trace.controller_error == "the controller pi has failed"
    failed = parse_piece({"choices": [{**choice, "steering_trace": {"error": "several runs"}}]}).trace
    assert failed is not None and (failed.error, failed.gates.size, failed.live) == ("several runs", 0, {})
    plain = parse_piece({"choices": [other]})
    assert (plain.text, plain.readouts, plain.trace) == ("", {}, None)


def test_trace_without_positions() -> None:
    """Catches an error for a request that generated no token with gated edits."""
    choice = {"text": "a", "steering_trace": {"positions": [], "gates": [], "live": {}}}
    for parsed in (parse_completion({"choices": [choice]}).choices[0], parse_piece({"choices": [choice]})):
        assert parsed.trace is not None and parsed.trace.positions.shape == (0,)
        assert parsed.trace.gates.shape == (0, 0) and parsed.trace.gates.dtype == np.float32
        assert parsed.trace.live == {}


def test_pieces_have_captures_and_reasons() -> None:
    """Catches captures of a streamed answer that are lost, those of another choice, and a stream without its end."""
    reports = [{"logging": {"status": "ok", "error": None, "data": {"choice": index}}} for index in (1, 0)]
    choices = [{"index": 1 - i, "capture_results": report} for i, report in enumerate(reports)]
    piece = parse_piece({"object": "capture_results", "id": "cmpl-1", "choices": choices})
    assert (piece.text, piece.id, [*piece.captures]) == ("", "cmpl-1", ["logging"])
    assert (piece.captures["logging"].status, piece.captures["logging"].data) == ("ok", {"choice": 0})
    assert piece.capture_results is piece.captures
    ended = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop", "stop_reason": "b"}
    last = parse_piece({"choices": [ended]})
    assert (last.text, last.finish_reason, last.stop_reason, last.captures) == ("a", "stop", "b", {})
    first = parse_piece({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
    assert (first.finish_reason, first.stop_reason) == (None, None)


def test_errors_in_streams_have_their_type() -> None:
    """Catches errors of a stream without the type that the same error has in an answer."""
    error = {"message": "unknown module", "type": "BadRequestError", "param": "steering_modules[0]", "code": 400}
    with pytest.raises(ServerError) as raised:
        parse_piece({"error": error})
    found = raised.value.status, raised.value.param, raised.value.kind
    assert found == (400, "steering_modules[0]", "BadRequestError")


def test_errors_of_the_server(url: str) -> None:
    """Catches errors without the server's message, parameter or type."""
    with Client(url) as client:
        with pytest.raises(ServerError, match=r"unknown module 'calm'.*HTTP 404") as missing:
            client.get("calm")
        assert (missing.value.status, missing.value.param, missing.value.kind) == (404, "name", "NotFoundError")
        with pytest.raises(ServerError, match="layers 0 to 3"):
            client.register("calm", base={"post_block": {9: vector(1)}})
        with pytest.raises(ServerError, match="missing"):
            list(client.stream_chat([{"role": "user", "content": "Hi"}], steering_modules=[("missing", 1.0)]))
        with pytest.raises(SteeringError, match="finite"):
            client.register("calm", base={"post_block": {1: vector(1) * np.nan}})


def test_chat_and_stream_chat(url: str, app: FastAPI) -> None:
    """Catches lost pieces of a stream, and a lost ``steering_applied``."""
    messages = [{"role": "user", "content": "Hi"}]
    with Client(url) as client:
        whole = client.chat(messages, steering_modules=[("calm", 1.0)], steering_vectors={"post_block": {1: vector(1)}})
        assert whole.applied == SteeringApplied.model_validate(
            {"epoch": 1, "global": None, "modules": [], "request": "sha256:0"}
        )
        pieces = list(client.stream_chat(messages, steering_modules=["calm"]))
        assert "".join(piece.text for piece in pieces)[:6] == "I am c"
        assert [piece.applied is not None for piece in pieces] == [True, False, False]
        assert (whole.steering_applied, pieces[0].steering_applied) == (whole.applied, pieces[0].applied)
        assert client.chat(messages).applied is None
    first = app.state.bodies[0]
    assert first["model"] == "tiny"
    assert first["steering_vectors"]["post_block"]["1"]["dtype"] == "float32"


async def test_async_client_matches_the_client(url: str) -> None:
    """Catches a method that one client lacks, or that behaves differently."""
    public = [
        {name: list(inspect.signature(method).parameters) for name, method in vars(kind).items()
         if callable(method) and not name.startswith("_") and name != "model"}
        for kind in (Client, AsyncClient)
    ]  # fmt: skip
    assert public[0] == public[1]
    messages = [{"role": "user", "content": "Hi"}]
    async with AsyncClient(url) as client:
        info = await client.register("calm", **content())
        assert info.digest == module().digest
        assert (await client.get("calm")).digest == info.digest
        assert (await client.set(modules=["calm"])).modules[0].digest == info.digest
        assert (await client.status()).digest != (await client.clear()).digest
        assert len((await client.list()).data) == 1
        assert (await client.delete("calm")).deleted == [info.digest]
        assert (await client.chat(messages)).text == "I am plain."
        pieces = [piece.text async for piece in client.stream_chat(messages)]
        assert "".join(pieces) == "I am plain."
        with pytest.raises(ServerError):
            await client.get("calm")


def test_to_json() -> None:
    """Catches numbers changed by the encoding, and values sent as their repr."""
    encoded = json.loads(json.dumps(to_json({"v": vector(1), "k": np.stack([vector(1), vector(2)]), "l": range(3),
                                           "n": np.float32(1.5), "deep": [{"t": torch.ones(2)}]}, "f")))  # fmt: skip
    assert [encoded[key]["shape"] for key in ("v", "k")] == [[8], [2, 8]]
    assert encoded["deep"][0]["t"]["shape"] == [2]
    assert (encoded["l"], encoded["n"]) == ([0, 1, 2], 1.5)
    with pytest.raises(SteeringError, match=r"f\.a\[1\]: .*cannot be sent"):
        to_json({"a": [1, object()]}, "f")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"post_block": {15: [1.0], "15": [2.0]}}, "f.post_block: key 15 is given twice"),
        ({"post_block": {15: [1.0, float("nan")]}}, r"f.post_block.15\[1\]: nan cannot be sent as JSON"),
        ({"scale": np.float32("inf")}, "f.scale: inf cannot be sent as JSON"),
        ({"scale": np.longdouble(1)}, "f.scale"),
        (
            {"description": ["a", "b\ud800"]},
            r"f.description\[1\]: cannot be sent: character 1 is an unpaired surrogate",
        ),
        ({"provenance": {"\ud800": "a"}}, "f.provenance: cannot be sent: character 0 is an unpaired surrogate"),
    ],
)
def test_to_json_rejects_values_without_a_json_form(wrong: Any, words: str) -> None:
    """Catches a lost vector, and errors of the json module."""
    with pytest.raises(SteeringError, match=words):
        to_json(wrong, "f")


def test_integers_stay_integers() -> None:
    """Catches tokens of a prompt and positions, given as arrays, that are sent as a vector of float32."""
    given = {
        "prompt": torch.tensor([5, 6]),
        "alignment": np.array([[0, 1], [1, 2]]),
        "positions": np.array([1], np.uint8),
    }
    assert to_json(given, "f") == {"prompt": [5, 6], "alignment": [[0, 1], [1, 2]], "positions": [1]}


def test_arrays_without_dimensions_are_numbers() -> None:
    """Catches the norm of a tensor, as a strength, refused as a vector without components."""
    given = {"strength": torch.ones(4).norm(), "temperature": np.array(0.5, np.float32), "n": torch.tensor(2)}
    assert to_json(given, "f") == {"strength": 2.0, "temperature": 0.5, "n": 2}
    for wrong in (torch.tensor(float("nan")), torch.tensor(1j), np.ma.masked):
        with pytest.raises(SteeringError, match=r"f\.strength: "):
            to_json({"strength": wrong}, "f")


def test_a_text_is_not_messages() -> None:
    """Catches a text whose letters the server takes for messages, with an error for each kind of message."""
    with Client(model="m") as client:
        for call in (client.chat, lambda text: list(client.stream_chat(text))):
            with pytest.raises(SteeringError, match=r"messages: must be a list such as .*, not a text"):
                call("Hello")


async def test_streams_are_refused_where_the_answer_is_whole() -> None:
    """Catches a JSON error for the events of a stream."""
    with Client(model="m") as client:
        for call in (lambda: client.complete("one", stream=True), lambda: client.chat([], stream=True)):
            with pytest.raises(SteeringError, match=r"stream: .*use stream_chat"):
                call()
    async with AsyncClient(model="m") as asynchronous:
        with pytest.raises(SteeringError, match=r"stream: .*use stream_chat"):
            await asynchronous.complete("one", stream=True)


@pytest.mark.parametrize("shape", [(1025, 2), (70, 65536)], ids=["rows", "components"])
def test_to_json_of_a_matrix_of_any_size(shape: tuple[int, int]) -> None:
    """Catches a matrix of a ``replace`` edit that is refused because a projection may not have so many directions."""
    rows = np.random.default_rng(0).standard_normal(shape, np.float32)
    edit = {"kind": "replace", "point": "post_block", "layers": [1], "tokens": [[0, len(rows)]]}
    for given in (rows, torch.from_numpy(rows)):
        (sent,) = to_json([{**edit, "vector": given}], "steering")
        assert np.array_equal(Edit(**sent).vector, rows)
    with pytest.raises(SteeringError, match=r"steering\[0\].vector: has shape .*at most 33554432 in total"):
        to_json([{**edit, "vector": np.broadcast_to(rows[0, 0], (65536, 513))}], "steering")


def test_to_json_of_mixed_numbers() -> None:
    """Catches a list encoded by the type of its first element."""
    assert json.dumps(to_json([0.5, np.float32(1.5), 2, np.float64(0.25)], "f")) == "[0.5, 1.5, 2, 0.25]"


def test_inline_rows() -> None:
    """Catches rows of another shape, order or dtype, other rows under the names of ``LLM``, and unclear errors.

    Also catches an error about the size of rows that were stored by request.
    """
    rows = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    data = base64.b64encode(rows.view(torch.uint8).numpy().tobytes()).decode()
    site = {"positions": [4, 7], "dtype": "bfloat16", "shape": [2, 3], "data": data}
    report = {"status": "ok", "error": None, "sites": {"post_block": {"2": site}}}
    choice = {"text": "a", "capture_results": {"memory": report}}
    answer = parse_completion({"choices": [choice]})
    found = answer.choices[0].captures["memory"].sites["post_block", 2]
    assert torch.equal(found.rows, rows)
    assert found.positions.tolist() == [4, 7]
    assert answer.capture_results is answer.choices[0].capture_results is answer.choices[0].captures
    result = answer.capture_results["memory"]
    assert torch.equal(result.tensor("post_block", 2), rows)
    assert result.positions("post_block", 2).tolist() == [4, 7]
    with pytest.raises(KeyError, match=r"post_block\[3\] was not captured; captured sites: post_block\[2\]"):
        result.tensor("post_block", 3)
    # Whether rows were too large or stored by request: the client does not know which.
    with pytest.raises(KeyError, match=r"on the server and not in the response; .* fetch"):
        CaptureAnswer("ok", None, id="1").tensor("post_block", 2)


Outcome = Callable[[httpx.Request], httpx.Response]


def failing(*outcomes: int | type[Exception]) -> tuple[httpx.MockTransport, list[httpx.Request]]:
    """Return a server that fails with these outcomes in turn and then succeeds, and the requests it received."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) > len(outcomes):
            return httpx.Response(200, json={"epoch": 1, "data": [], "choices": [{"text": "a"}]})
        outcome = outcomes[len(seen) - 1]
        if isinstance(outcome, int):
            return httpx.Response(outcome, json={"error": {"message": "later", "param": None}})
        raise outcome("lost")

    return httpx.MockTransport(handle), seen


def raised_unless(succeeds: bool) -> Any:
    return nullcontext() if succeeds else pytest.raises((ServerError, httpx.TransportError))


@pytest.mark.parametrize(
    ("outcomes", "attempts"), [((503, 429), 3), ((httpx.ConnectError, httpx.ReadError), 3), ((httpx.ReadTimeout,), 2),
                               ((400, 400), 1), ((500, 500), 1), ((503,) * 5, 3), ((httpx.ConnectError,) * 5, 3)]
)  # fmt: skip
def test_retries_idempotent_requests(outcomes: tuple[Any, ...], attempts: int) -> None:
    """Catches a client that gives up after one lost connection, endless retries, and retries that cannot succeed."""
    transport, seen = failing(*outcomes)
    with raised_unless(attempts > len(outcomes)):
        assert Client(transport=transport, retry=FAST_RETRY).list().data == []
    assert len(seen) == attempts


def test_completions_are_not_repeated() -> None:
    """Catches a repeated completion that the server may still be running."""
    transport, seen = failing(httpx.ReadError)
    with pytest.raises(httpx.ReadError, match=r"cannot reach http://localhost:8000.*: lost; see the server's log"):
        Client(transport=transport, model="tiny", retry=FAST_RETRY).complete("Hi")
    assert len(seen) == 1
    transport, seen = failing(503, httpx.ConnectError)
    assert Client(transport=transport, model="tiny", retry=FAST_RETRY).complete("Hi").text == "a"
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("outcomes", "attempts"), [((503, 429), 3), ((httpx.ConnectError, 429), 3), ((503,) * 5, 3), ((400,), 1),
                               ((httpx.ReadError,), 1), ((httpx.ConnectTimeout,) * 5, 3)]
)  # fmt: skip
async def test_retries_streams_that_have_not_started(outcomes: tuple[Any, ...], attempts: int) -> None:
    """Catches streams without retries, and streams requested again after a response started."""
    messages = [{"role": "user", "content": "Hi"}]
    for kind in (Client, AsyncClient):
        transport, seen = failing(*outcomes)
        pieces = kind(transport=transport, model="tiny", retry=FAST_RETRY).stream_chat(messages)
        with raised_unless(attempts > len(outcomes)):
            _ = [each async for each in pieces] if kind is AsyncClient else list(pieces)
        assert len(seen) == attempts


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("key", ["vsk-a\n", "ключ", " vsk-a", "vsk\x00a"])
def test_rejects_keys_that_no_header_can_carry(client: Any, key: str) -> None:
    """Catches an error that shows the key, and one that looks like an unreachable server."""
    with pytest.raises(SteeringError, match="api_key") as refused:
        client(api_key=key)
    assert "vsk" not in str(refused.value)


@pytest.mark.parametrize("tokens", [[1, 2], np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), np.int64(2)]])
def test_detokenize_takes_arrays(tokens: Any) -> None:
    """Catches arrays of tokens that `detokenize` cannot send, although other methods accept arrays."""
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"prompt": "a b"})

    with Client(model="m", transport=httpx.MockTransport(answer)) as client:
        assert client.detokenize(tokens) == "a b"
    assert bodies == [{"model": "m", "tokens": [1, 2]}]


def test_retry_delays() -> None:
    """Catches delays that do not grow, or that are shorter than ``Retry-After``."""
    retry = Retry(attempts=9, first=1.0, longest=4.0)
    waits = [retry.delay(attempt, httpx.Response(503), True) or 0.0 for attempt in range(1, 6)]
    assert all(low <= wait <= 2 * low for low, wait in zip((0.5, 1, 2, 2, 2), waits, strict=True))
    assert (retry.delay(1, httpx.Response(503, headers={"retry-after": "7"}), True) or 0.0) >= 7
    assert (retry.delay(1, httpx.Response(503, headers={"retry-after": "soon"}), True) or 9.0) <= 1


def test_results_are_those_of_outputs() -> None:
    """Catches a result of the client with other attributes or methods than the same result of ``LLM``."""
    assert (ReadoutValues, Trace, Rows) == (Readouts, SteeringTrace, SiteRows)
    sites = {("post_block", 1): SiteRows(np.array([2, 5]), torch.ones(2, 3, dtype=torch.bfloat16))}
    answer = CaptureAnswer("ok", None, sites=sites)
    assert answer.numpy("post_block", 1).dtype == np.float32
    assert answer.positions("post_block", 1).tolist() == [2, 5]
    readout = {"positions": [2], "token_ids": [[[7, 8]]], "logprobs": [[[-1.0, -2.0]]]}
    lens = parse_completion({"choices": [{"text": "", "readouts": {"l": readout}}]}).choices[0].readouts["l"]
    assert (lens.token_ids is lens.indices, lens.logprobs is lens.values, lens.values.shape) == (True, True, (1, 1, 2))

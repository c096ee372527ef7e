# SPDX-License-Identifier: Apache-2.0
"""Capture results in HTTP responses: inline, stored, in streams, and after disconnects."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import load
from starlette.middleware.gzip import GZipMiddleware
from vllm.sampling_params import SamplingParams

from tests.server.fakes import HIDDEN
from tests.server.http import answers
from tests.server.http.answers import DONE, SPEC, captured, done, finish_samples, make_capturing_app
from vllm_steer.capture import CapturedRequest, CaptureResult
from vllm_steer.capture.results import CaptureResults
from vllm_steer.params import PROMPT_KEY
from vllm_steer.server.http import capture_reports, response_writer
from vllm_steer.server.http.apply_fields import apply_to_params
from vllm_steer.server.http.capture_reports import encode_inline
from vllm_steer.server.http.request_context import Choice, RequestContext, current_request, track_sample
from vllm_steer.server.routes.captures import capture_store_of

ROUTE = "/v1/completions"
BODY: dict[str, Any] = {"capture": {"memory": SPEC}}


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def response_of(app: FastAPI, **fields: Any) -> Any:
    response = await client_of(app).post(ROUTE, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    assert int(response.headers["content-length"]) == len(response.content)
    return response.json()


@pytest.mark.parametrize("fields", [{}, {"stream": [f"data: {{}}\n\n{DONE}"]}], ids=["JSON", "stream"])
async def test_results_are_released_after_the_response(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows of the first request that stay in memory: vLLM's own tasks start in its context."""
    contexts: list[Any] = []

    def finish(*args: Any) -> Any:
        contexts.append(current_request.get())
        return finish_samples(*args)

    monkeypatch.setattr(answers, "finish_samples", finish)
    app = make_capturing_app([{"memory": done(captured())}])
    response = await client_of(app).post(ROUTE, json={**BODY, **fields})
    assert '"post_block"' in response.text
    assert [context.results for context in contexts] == [{}]


async def test_late_results_of_a_disconnected_client_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows of a stream whose request vLLM aborts only after the response ended."""
    contexts: list[Any] = []

    async def leave_running(body: Any, *args: Any) -> None:
        apply_to_params(body, SamplingParams())
        contexts.append(current_request.get())

    monkeypatch.setattr(answers, "finish_samples", leave_running)
    await client_of(make_capturing_app([{}])).post(ROUTE, json=BODY)
    (context,) = contexts
    Choice(context, 0).on_results(CaptureResults({"memory": done(captured())}))
    assert context.results == {}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
async def test_rows_belong_to_their_choice(dtype: str) -> None:
    """Catches results in the order in which samples finish, and rows in another dtype or form."""
    results = [{"memory": done(captured(value=i, dtype=getattr(torch, dtype)))} for i in range(3)]
    for i, choice in enumerate((await response_of(make_capturing_app(results)))["choices"]):
        assert (choice["index"], choice["text"]) == (i, "é")
        result = choice["capture_results"]["memory"]
        assert (result["status"], result["error"]) == ("ok", None)
        site = result["sites"]["post_block"]["1"]
        assert (site["positions"], site["dtype"], site["shape"]) == ([0, 1, 2], dtype, [3, HIDDEN])
        rows = torch.frombuffer(bytearray(base64.b64decode(site["data"])), dtype=getattr(torch, dtype))
        assert rows.tolist() == [i] * 3 * HIDDEN


async def test_reports_of_all_kinds() -> None:
    """Catches errors without a reason, partial results without rows, and reports that are not valid JSON."""
    results = {
        "custom": done({"path": "/a/b", "index": 3}),
        "error": done(None, "error", "disk full \udc80"),
        "partial": done(captured(), "partial", "one is missing"),
        "strange": done(object()),
        "endless": done({"norm": float("inf")}),
    }
    (choice,) = (await response_of(make_capturing_app([results])))["choices"]
    reports = choice["capture_results"]
    assert reports["custom"] == {"status": "ok", "error": None, "data": {"path": "/a/b", "index": 3}}
    assert reports["error"] == {"status": "error", "error": "disk full \udc80"}
    assert reports["partial"]["error"] == "one is missing"
    assert "post_block" in reports["partial"]["sites"]
    for name in ("strange", "endless"):
        assert reports[name]["status"] == "error"
        assert "JSON" in reports[name]["error"]


def values_of(choices: list[Any]) -> list[float | None]:
    """Return the value of each choice's rows, or None if it has none."""
    reports = [choice["capture_results"]["memory"] for choice in choices]
    sites = [report.get("sites", {}).get("post_block", {}).get("1") for report in reports]
    return [None if s is None else float(np.frombuffer(base64.b64decode(s["data"]), "<f4")[0]) for s in sites]


@pytest.mark.failure(18)
async def test_rows_belong_to_their_prompt() -> None:
    """Catches rows of the first prompt only, or rows reported for another prompt."""
    results = [{"memory": done(captured(value=i))} for i in range(6)]
    assert values_of((await response_of(make_capturing_app(results, prompts=3)))["choices"]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.failure(18, control=True)
async def test_unnumbered_prompts_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if all prompts count as the first, choices of the others have no rows."""

    def unnumbered(processor: Any, request: Any) -> None:
        request.sampling_params.extra_args[PROMPT_KEY] = 0
        track_sample(processor, request)

    monkeypatch.setattr(answers, "track_sample", unnumbered)
    results = [{"memory": done(captured(value=i))} for i in range(6)]
    values = values_of((await response_of(make_capturing_app(results, prompts=3)))["choices"])
    assert values[2:] == [None] * 4


async def test_choice_without_a_result() -> None:
    """Catches a choice without any report."""
    choices = (await response_of(make_capturing_app([{"memory": done(captured())}]), choices=2))["choices"]
    assert choices[0]["capture_results"]["memory"]["status"] == "ok"
    assert choices[1]["capture_results"]["memory"]["status"] == "error"


async def test_response_without_choices_is_an_error() -> None:
    """Catches rows that are dropped silently because no choice can carry them."""
    response = await client_of(make_capturing_app([{"memory": done(captured())}])).post(
        ROUTE, json={**BODY, "choices": 0}
    )
    assert response.status_code == 500
    assert response.json()["error"]["param"] == "capture"


async def test_errors_and_other_requests_pass_unchanged() -> None:
    """Catches rewritten errors, and changed responses of requests that capture nothing."""
    app = make_capturing_app([{"memory": done(captured())}])
    response = await client_of(app).post(ROUTE, json={**BODY, "status": 418})
    assert (response.status_code, response.json()) == (418, {"error": {"message": "no"}})
    assert (await client_of(app).post(ROUTE, json={})).json() == {"choices": [{"index": 0, "text": "é"}]}


@pytest.mark.parametrize(
    "pieces",
    [
        ["data: {}\n\n", "data: {}\n\n", DONE],
        ["data: {}\n\ndata: {}\n\n" + DONE],
        ["data: {}\n\n", "data: {}\n\n"],
        ["data: {}\n\n", f'data: {{"text": "{DONE[:12]}"}}\n\n', DONE],
        [DONE],
    ],
)
async def test_streams_get_one_more_event(pieces: list[str]) -> None:
    """Catches an event that is missing, duplicated or after the end, wherever the chunks are split."""
    app = make_capturing_app([{"memory": done(captured())}, {"memory": done(captured())}])
    response = await client_of(app).post(ROUTE, json={**BODY, "stream": pieces})
    text = "".join(pieces)
    before = text.removesuffix(DONE)
    assert response.text.startswith(f"{before}data: {{")
    assert response.text.endswith("}\n\n" + text[len(before) :])
    event = json.loads(response.text.removeprefix(before).removesuffix(DONE).removeprefix("data: "))
    assert event["object"] == "capture_results"
    assert [choice["index"] for choice in event["choices"]] == [0, 1]
    assert event["choices"][0]["capture_results"]["memory"]["sites"]["post_block"]["1"]["shape"] == [3, HIDDEN]


async def test_stream_choice_without_a_result() -> None:
    """Catches a failed prompt of a stream without any report."""
    app = make_capturing_app([{"memory": done(captured())}], runs=0)
    response = await client_of(app).post(ROUTE, json={**BODY, "stream": ['data: {"error": {}}\n\n', DONE]})
    event = json.loads(response.text.split("data: ")[2])
    (choice,) = event["choices"]
    assert (choice["index"], choice["capture_results"]["memory"]["status"]) == (0, "error")


async def test_compressed_responses_are_rejected() -> None:
    """Catches a compressed response that is parsed as JSON or damaged."""
    app = make_capturing_app([{"memory": done(captured())}])
    inner = app.user_middleware.pop()
    app.add_middleware(GZipMiddleware, minimum_size=1)
    app.user_middleware.insert(0, inner)
    response = await client_of(app).post(ROUTE, json=BODY, headers={"accept-encoding": "gzip"})
    assert response.status_code == 400
    assert "gzip" in response.json()["error"]["message"]


ROWS_PER_KIB = 1024 // (4 * HIDDEN)


async def test_large_rows_are_stored() -> None:
    """Catches an ignored limit, stored rows that differ, and rows that cannot be deleted."""
    app = make_capturing_app(
        [{"memory": done(captured(ROWS_PER_KIB))}, {"memory": done(captured(ROWS_PER_KIB + 1))}], capture_inline_kib=1
    )
    small, large = (choice["capture_results"]["memory"] for choice in (await response_of(app))["choices"])
    assert "sites" in small
    assert set(large) == {"status", "error", "id", "bytes", "format", "expires_in"}
    assert len(large["id"]) >= 32
    async with client_of(app) as client:
        response = await client.get(f"/v1/captures/{large['id']}")
        tensors = load(response.content)
        assert tensors["post_block.1"].shape == (ROWS_PER_KIB + 1, HIDDEN)
        assert tensors["positions"].tolist() == list(range(ROWS_PER_KIB + 1))
        assert len(response.content) == int(response.headers["content-length"]) == large["bytes"]
        assert (await client.delete(f"/v1/captures/{large['id']}")).status_code == 204
        for gone in (
            await client.get(f"/v1/captures/{large['id']}"),
            await client.delete(f"/v1/captures/{large['id']}"),
        ):
            assert gone.status_code == 404
            assert gone.json()["error"]["code"] == 404
    assert len(capture_store_of(app)) == 0


async def test_full_store_is_an_error() -> None:
    """Catches ids of rows that were not stored."""
    app = make_capturing_app([{"memory": done(captured())}], capture_inline_kib=0, capture_store_mib=0)
    result = (await response_of(app))["choices"][0]["capture_results"]["memory"]
    assert result["status"] == "error"
    assert "--capture-store-mib" in result["error"]
    assert len(capture_store_of(app)) == 0


async def test_long_reports_are_stored() -> None:
    """Catches responses of unbounded size, and short reports that are not inline."""
    long = {"numbers": list(range(20000))}
    app = make_capturing_app([{"long": done(long), "short": done({"path": "/a"})}], capture_inline_kib=0)
    reports = (await response_of(app))["choices"][0]["capture_results"]
    assert reports["short"]["data"] == {"path": "/a"}
    assert "data" not in reports["long"]
    assert reports["long"]["format"] == "json"
    response = await client_of(app).get(f"/v1/captures/{reports['long']['id']}")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == long


async def test_choice_with_several_model_runs_is_an_error() -> None:
    """Catches the rows of the last run reported as the rows of the choice."""
    app = make_capturing_app([{"memory": done(captured())}], runs=2)
    (choice,) = (await response_of(app))["choices"]
    assert choice["capture_results"]["memory"]["status"] == "error"
    assert "several times" in choice["capture_results"]["memory"]["error"]


class Connection:
    """A client that can disconnect at any time."""

    def __init__(self, app: FastAPI, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.stuck = asyncio.Event()
        self.blocked = False
        self._disconnected = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json")]
        asgi = {"spec_version": "2.3"}  # as uvicorn declares
        scope = {"type": "http", "method": "POST", "path": ROUTE, "headers": headers, "query_string": b"", "asgi": asgi}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def disconnect(self) -> None:
        self._disconnected.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.blocked and message.get("body"):
            self.stuck.set()
            await asyncio.Event().wait()  # as a server blocks while the client does not read
        self.sent.append(message)


@pytest.mark.parametrize("stream", [None, [DONE]])
async def test_slow_consumer_delays_only_its_request(stream: list[str] | None) -> None:
    """Catches an event loop that blocks on a consumer, and a consumer cancelled by a disconnect."""
    slow: Future[CaptureResult] = Future()
    apps = [make_capturing_app([{"memory": future}], capture_inline_kib=0) for future in (slow, done(captured()))]
    connection, leaving = (Connection(apps[0], {**BODY, "stream": stream}) for _ in range(2))
    await asyncio.sleep(0.1)
    assert (await response_of(apps[1]))["choices"]
    assert not connection.task.done()
    assert not any(b"choices" in message.get("body", b"") for message in connection.sent)
    leaving.disconnect()
    await asyncio.wait_for(leaving.task, 10)
    assert not slow.cancelled()
    slow.set_result(CaptureResult("ok", None, captured()))
    await asyncio.wait_for(connection.task, 10)
    assert any(b"choices" in message.get("body", b"") for message in connection.sent)
    assert not any(b"choices" in message.get("body", b"") for message in leaving.sent)
    assert len(capture_store_of(apps[0])) == 1


async def test_disconnect_at_the_last_event() -> None:
    """Catches stored rows whose id no client has received."""
    app = make_capturing_app([{"memory": done(captured())}] * 2, capture_inline_kib=0)
    store = capture_store_of(app)
    # The connection blocks at the first event; rows are stored only before the last one.
    for events, stored in ((["data: {}\n\n", DONE], 0), ([DONE], 2)):
        connection = Connection(app, {**BODY, "stream": events})
        connection.blocked = True
        await asyncio.wait_for(connection.stuck.wait(), 10)
        assert len(store) == stored
        connection.disconnect()
        await asyncio.wait_for(connection.task, 10)
        assert len(store) == 0


class LateDisconnect(Connection):
    """A client whose disconnect the server reports some turns of the event loop later."""

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:
            await self._disconnected.wait()
            for _ in range(3):
                await asyncio.sleep(0)
        return await super()._receive()


@pytest.mark.failure(20)
@pytest.mark.parametrize("stream", [None, [DONE], ["data: {}\n\n", DONE]])
@pytest.mark.parametrize("yields", [True, pytest.param(False, marks=pytest.mark.failure(20, control=True))])
async def test_disconnect_just_before_the_response(
    stream: list[str] | None, yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows stored until they expire although the disconnect was known. Negative control: without yielding."""
    connections: list[Connection] = []
    yield_to_disconnect = response_writer._yield_to_disconnect

    async def disconnect_and_yield() -> None:
        connections[0].disconnect()
        if yields:
            await yield_to_disconnect()

    monkeypatch.setattr(response_writer, "_yield_to_disconnect", disconnect_and_yield)
    app = make_capturing_app([{"memory": done(captured())}], capture_inline_kib=0)
    connections.append(LateDisconnect(app, {**BODY, "stream": stream}))
    await asyncio.wait_for(connections[0].task, 10)
    assert len(capture_store_of(app)) == (0 if yields else 1)


@pytest.mark.parametrize("rows", [3, 20_000])
@pytest.mark.parametrize("stream", [None, [DONE]])
async def test_large_rows_are_encoded_in_a_thread(
    rows: int, stream: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows of megabytes encoded in the event loop, where they delay the tokens of other requests."""
    threads: list[threading.Thread] = []

    def encode(result: CapturedRequest) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return encode_inline(result)

    monkeypatch.setattr(capture_reports, "encode_inline", encode)
    app = make_capturing_app([{"memory": done(captured(rows))}], capture_inline_kib=4096)
    response = await client_of(app).post(ROUTE, json={**BODY, **({"stream": stream} if stream else {})})
    assert '"post_block"' in response.text
    assert [thread is threading.main_thread() for thread in threads] == [rows == 3]


@pytest.mark.parametrize("number", [10**5000, float("nan")], ids=["a long number", "not a number"])
async def test_reports_with_numbers_that_json_lacks(number: float) -> None:
    """Catches a short report that breaks the whole response because it was not tried alone."""
    app = make_capturing_app([{"memory": done({"number": number})}])
    [choice] = (await response_of(app))["choices"]
    assert "not valid JSON" in choice["capture_results"]["memory"]["error"]


def test_positions_are_plain_integers() -> None:
    """Catches numpy integers, which are not valid JSON."""
    site = encode_inline(captured())["post_block"]["1"]
    assert all(type(position) is int for position in site["positions"])
    assert np.frombuffer(base64.b64decode(site["data"]), "<f4").shape == (3 * HIDDEN,)


async def test_a_choice_that_finishes_while_reports_are_built() -> None:
    """Catches a stream that ends without its last event, since a sibling finished during the wait for a consumer."""
    slow: Future[CaptureResult] = Future()
    context = RequestContext(consumers=("memory",), results={1: CaptureResults({"memory": slow})})
    building = asyncio.create_task(capture_reports.build_reports(context, 1 << 20, 1 << 20, no_store))
    await asyncio.sleep(0)
    Choice(context, 0).on_results(CaptureResults({"memory": done(captured(value=5))}))
    slow.set_result(CaptureResult("ok", None, captured(value=7)))
    reports = await asyncio.wait_for(building, 10)
    assert values_of([{"capture_results": reports[i]} for i in range(2)]) == [5, 7]


async def no_store(size: int, make: Any, file_format: Any) -> dict[str, Any]:
    raise AssertionError(f"{size} bytes were stored")

# SPDX-License-Identifier: Apache-2.0
"""Misspelt fields in bodies, forms and events of routes that run the model but cannot steer."""

from __future__ import annotations

import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

from tests.server.application import client_of, make_app
from tests.server.fakes import FakeEngine
from tests.server.http.test_middleware import FIELDS, ROUTE, refusal
from vllm_steer.limits import MAX_NAMES
from vllm_steer.server.http import misspelt_fields
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_guard import UNSTEERABLE_ROUTES

AUDIO = "/v1/audio/transcriptions"
UPLOAD = {"file": ("a.wav", b"RIFF")}
MISSPELT = {
    "steering_vector": "did you mean steering_vectors",
    "Steering-Vectors": "did you mean steering_vectors",
    "captrue": "did you mean capture",
    "stop_no": "did you mean stop_on",
    "apply_steering_vectors": "field of vllm-lens",
    "ste\u0435ring": "unknown field",
}


@pytest.mark.parametrize("route", sorted(UNSTEERABLE_ROUTES))
@pytest.mark.parametrize(("name", "words"), MISSPELT.items())
async def test_refuses_misspelt_fields_where_none_can_be_steered(
    name: str, words: str, route: str, client: httpx.AsyncClient
) -> None:
    """Catches a fluent, unsteered HTTP 200 for a misspelt field, or one of another project."""
    error = refusal(await client.post(route, json={"model": "m", name: {"a": 1}}))
    assert error["param"] == name
    assert words in error["message"] and f"{route} cannot steer" in error["message"]


EDITS = [{"kind": "add", "point": "post_block", "layers": 1, "vector": [1.0]}]


@pytest.mark.parametrize(
    ("inside", "field"),
    [
        ({"metadata": {"steering": EDITS}}, "metadata.steering"),
        ({"metadata": {"steering": json.dumps(EDITS)}}, "metadata.steering"),
        ({"options": {"steering_modules": ["calm"]}}, "options.steering_modules"),
        ({"parameters": {"capture": {"memory": {}}}}, "parameters.capture"),
        ({"nvext": {"readouts": {"r": {}}}}, "nvext.readouts"),
        ({"nvext": {"apply_steering_vectors": []}}, "nvext.apply_steering_vectors"),
        ({"parameters": {"extra_body": {"stop_on": [{}]}}}, "parameters.extra_body.stop_on"),
        ({"provider": {"steering": EDITS}}, "provider.steering"),
        ({"chat_template_kwargs": {"steering_vectors": {"post_block": {}}}}, "chat_template_kwargs.steering_vectors"),
        ({"model_kwargs": {"patch": []}}, "model_kwargs.patch"),
    ],
)
async def test_refuses_fields_within_wrappers(inside: dict[str, Any], field: str, client: httpx.AsyncClient) -> None:
    """Catches an unsteered HTTP 200 for a field in an object that only another server or library reads."""
    await client.post(ROUTE, json=FIELDS)  # the engine is known from here on
    error = refusal(await client.post(ROUTE, json={"prompt": "x", **inside}))
    assert error["param"] == field
    assert "would be ignored here" in error["message"]


@pytest.mark.parametrize("name", ["dose", "doses"])
async def test_refuses_doses_beside_a_module(name: str, client: httpx.AsyncClient) -> None:
    """Catches a module that steers at its own scale, because its dose stands beside it."""
    error = refusal(await client.post(ROUTE, json={"prompt": "x", "steering_modules": ["calm"], name: 0.3}))
    assert error["param"] == name and '"dose": 0.3}' in error["message"]
    assert (await client.post(ROUTE, json={"prompt": "x", name: "5 mg"})).json() == {"steered": False}


async def test_refuses_fields_within_wrappers_where_none_can_be_steered(client: httpx.AsyncClient) -> None:
    """Catches an unsteered HTTP 200 of a route that cannot steer for a field in an object that it ignores."""
    error = refusal(await client.post("/v1/messages", json={"parameters": {"steering": EDITS}}))
    assert error["param"] == "parameters.steering"


async def test_objects_of_others_pass(client: httpx.AsyncClient) -> None:
    """Catches refusals of labels, of general names with another meaning, and of a server that does not steer."""
    body = {
        "metadata": {"steering": "off", "capture": "yes", "patch": True, "steer": "left"},
        "provider": {"capture": True, "readouts": 3, "stop_on": "\n", "patch": [1]},
        "options": {"num_ctx": 8, "capture_id": 1},
        "guided_json": {"properties": {"steering": {"type": "array"}, "capture": {"type": "object"}}},
        "chat_template_kwargs": {"enable_thinking": False, "capture": "x"},
    }
    await client.post(ROUTE, json=FIELDS)
    assert (await client.post(ROUTE, json={"prompt": "x", **body})).json() == {"steered": False}
    plain = client_of(make_app(FakeEngine(steering=False)))
    inside = {"metadata": {"steering": EDITS}, "nvext": {"capture": {"memory": {}}}}
    assert (await plain.post(ROUTE, json={"prompt": "x", **inside})).json() == {"steered": False}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-be"])
async def test_finds_misspelt_fields_in_other_encodings(encoding: str, client: httpx.AsyncClient) -> None:
    """Catches names that JSON parsers see and a search in UTF-8 does not."""
    body = json.dumps({"steering_vector": {}}).encode(encoding)
    headers = {"content-type": "application/json"}
    assert refusal(await client.post("/v1/messages", content=body, headers=headers))["param"] == "steering_vector"


@pytest.mark.parametrize("suffix", ["", "[post_block][1][]"])
@pytest.mark.parametrize(("name", "words"), MISSPELT.items())
async def test_refuses_misspelt_fields_of_forms(name: str, words: str, suffix: str, client: httpx.AsyncClient) -> None:
    """Catches a transcription without steering for a misspelt part of the form, or a part of an object."""
    answer = await client.post(AUDIO, files=UPLOAD, data={name + suffix: "{}"})
    error = refusal(answer)
    assert error["param"] == name
    assert words in error["message"] and f"{AUDIO} cannot steer" in error["message"]


async def test_refuses_the_misspelt_field_in_each_chunk(client: httpx.AsyncClient) -> None:
    """Catches a name that two chunks of an upload share, and one whose first half is taken for a name."""
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF\r\n'
    head = form + b'--x\r\nContent-Disposition: form-data; name="'

    async def post(name: bytes, cut: int) -> httpx.Response:
        body = head + name + b'"\r\n\r\n1\r\n--x--\r\n'

        async def chunks() -> AsyncIterator[bytes]:
            yield body[:cut]
            yield body[cut:]

        return await client.post(AUDIO, content=chunks(), headers={"content-type": "multipart/form-data; boundary=x"})

    for cut in range(len(head) - 12, len(head) + 20, 3):
        assert refusal(await post(b"steering_vector", cut))["param"] == "steering_vector"
        assert (await post(b"capture_id", cut)).json() == {"length": 4}


async def test_forms_of_vllm_pass(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Catches refusals of vLLM's own parts, of values, file names and of forms that no model reads."""
    names = {*TranscriptionRequest.model_fields, *TranslationRequest.model_fields} - {"file"}
    data = {**dict.fromkeys(names, "steering_vector"), "timestamp_granularities[]": "word", "note": 'name="captrue"'}
    upload = {"file": ("steering_vector.wav", b"captrue")}
    assert (await client.post(AUDIO, files=upload, data=data)).json() == {"length": 7}
    assert (await client.post("/raw", files=UPLOAD, data={"steering_vector": "1"})).status_code == 200
    assert engine.calls == []


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("name", "words"), MISSPELT.items())
def test_refuses_misspelt_fields_of_realtime_events(name: str, words: str, nested: bool, engine: FakeEngine) -> None:
    """Catches a realtime session that continues without steering after a misspelt field."""
    app = make_app(engine)

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text)

    for route in ("/v1/realtime", "/other"):
        app.websocket(route)(echo)
    app.add_middleware(SteeringMiddleware)
    plain = {"type": "session.update", "model": "m", "session": {"note": {name: 1}, "captrue": None}, "id": name}
    wrong = {**plain, "session": {name: {}}} if nested else {**plain, name: {}}
    client = TestClient(app)  # without its lifespan, which asks the engine
    with client.websocket_connect("/v1/realtime") as socket:
        for event in (plain, {"type": "input_audio_buffer.append", "audio": "steering_vector"}):
            socket.send_json(event)
            assert socket.receive_json() == event
        assert engine.calls == []
        socket.send_json(wrong)
        answer = socket.receive_json()
        assert answer["type"] == "error"
        assert answer["error"].startswith(f"session.{name}: " if nested else f"{name}: ")
        assert words in answer["error"] and "/v1/realtime cannot steer" in answer["error"]
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()
        with client.websocket_connect("/other") as other:  # of an application beside vLLM
            other.send_json(wrong)
            assert other.receive_json() == wrong


ANTHROPIC = {
    "messages": [{"role": "user", "content": "captures steering_vector", "steering_vector": 1}],
    "metadata": {"user_id": "x", "steer": True, "capture": {}},
    "tools": [{"name": "steer", "input_schema": {"properties": {"captures": {}, "steering_name": {}}}}],
    "stop_sequences": ["steering"],
    "stream": False,
    "container": None,
    "mcp_servers": [],
    "context_management": {},
    "betas": [],
    "output_config": {},
    "capture_id": 1,
    "steering_vector": None,
}


async def test_misspelt_fields_elsewhere_pass(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Catches refusals of nested keys, values, null and fields of the route's own API, and of routes without a model.

    Also catches a plain request that waits for the engine.
    """
    for body in (ANTHROPIC, {"state": {"steer": 1}, "questions": {"steering_vector": {}}}):
        assert (await client.post("/v1/messages", json=body)).json() == {"unsteered": "yes"}
    headers = {"content-type": "application/json"}
    gc.collect()
    gc.disable()  # in the deep recursion of the last body, finalizers of other tests' objects would fail
    try:
        for text in (b"", b"[1]", b"{", b'{"a": "\xff"}', b"[" * 100_000):
            response = await client.post("/v1/messages", content=text, headers=headers)
            assert response.status_code in (400, 422) and "detail" in response.json()  # FastAPI's own refusal
    finally:
        gc.enable()
    assert (await client.post("/tokenize", json={"steering_vector": 1})).status_code == 200
    assert engine.calls == []


async def test_misspelt_fields_without_enable_steering() -> None:
    """Catches a server without steering that refuses what stock vLLM serves, and one that ignores `steering_vector`."""
    client = client_of(make_app(FakeEngine(steering=False)))
    assert (await client.post("/v1/messages", json={"captures": {}, "lora_request": {}})).status_code == 200
    refusal(await client.post("/v1/messages", json={"steering_vector": {}}))
    assert (await client.post(AUDIO, files=UPLOAD, data={"captures": "1"})).status_code == 200
    refusal(await client.post(AUDIO, files=UPLOAD, data={"steering_vector": "1"}))


async def test_compares_a_limited_number_of_names(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a body of many keys, each of which is compared with all fields, and keys that are not compared at all."""
    compared: list[str] = []
    monkeypatch.setattr(misspelt_fields, "problem_of", lambda name: compared.append(name))
    await client.post(ROUTE, json=FIELDS)  # the engine is known from here on
    body = {f"key{i}": 0 for i in range(MAX_NAMES + 1)}
    file = b"".join(b'form-data; name="key%d"\r\n' % i for i in range(MAX_NAMES + 1))
    for answer in (
        await client.post("/v1/messages", json=body),
        await client.post(ROUTE, json=body),
        await client.post(AUDIO, files={"file": ("a", file)}),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")
    assert len(compared) <= 1  # the form's part itself
    del body["key0"]
    assert (await client.post(ROUTE, json=body)).status_code == 200
    assert len(compared) >= MAX_NAMES

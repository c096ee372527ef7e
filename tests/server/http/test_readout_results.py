# SPDX-License-Identifier: Apache-2.0
"""Readouts in HTTP responses: whole, and in streams while the tokens are generated."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.server.application import Body, add_error_handler
from tests.server.fakes import HIDDEN, FakeEngine
from vllm_steer import SamplingParams as SteeredParams
from vllm_steer.capture.readout_stream import ReadoutStream
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.frontend.sample_state import RunningCapture, SampleState
from vllm_steer.params import program_of
from vllm_steer.server.http.apply_fields import apply_to_params
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_context import track_sample
from vllm_steer.server.http.schemas import ReadoutValuesForm, TraceForm
from vllm_steer.server.http.stream_chunks import ChatChoice, ChatChunk, ChatDelta, CompletionChoice, CompletionChunk

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
PROMPT, TOKENS = 3, 4
PROBE = {"probe": [1.0] * HIDDEN, "point": "post_block", "layer": 1}
READOUTS: dict[str, Any] = {
    "score": PROBE,
    "all": {**PROBE, "positions": "all"},
    "two": {"projections": [[1.0] * HIDDEN] * 2, "point": "post_block", "layer": 2, "positions": [[2, 4]]},
}
DONE = "data: [DONE]\n\n"


class Sample:
    """One running sample with the attributes of vLLM's RequestState; the value of a column depends on the position."""

    def __init__(self, params: Any, index: int) -> None:
        program = program_of(params)
        assert program is not None
        self.request_id, self.request_index = f"r{index}", index
        self.external_req_id, self.parent_req = self.request_id, None
        self.prompt_len = PROMPT
        self.output_kind = RequestOutputKind.DELTA
        self.parent_req = None
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: self.num_generated)
        self.num_generated = 0
        self.width = program.layout.width
        self.receiver = RowReceiver()
        assembler = RowAssembler(4, HIDDEN, torch.float32)
        self.receiver.add_request(self.request_id, assembler)
        manager: Any = SimpleNamespace(model_name="")
        readouts = ReadoutStream(program, assembler, PROMPT)
        self._steering_sample = SampleState(
            capture=RunningCapture(manager, self.receiver, assembler, readouts=readouts)
        )
        track_sample(
            SimpleNamespace(request_states={self.request_id: self}),
            SimpleNamespace(request_id=self.request_id, sampling_params=params),
        )

    def step(self) -> None:
        """Run one step of the engine: the prompt, then one token each."""
        start, count = (PROMPT + self.num_generated - 1, 1) if self.num_generated else (0, PROMPT)
        rows = [record(self.request_index, start + i, self.width) for i in range(count)]
        index = RowIndex((self.request_id,), ((self.width,),), RECORDS)
        data = np.array(rows, np.float32).view(np.uint8)
        self.receiver._steps.append(StepRows(index, np.array([start]), np.array([count]), data))
        self.num_generated += 1
        if self.num_generated == TOKENS:
            self._steering_sample.finish_capture(self, None, None)


def record(sample: int, position: int, width: int) -> list[float]:
    return [1000 * sample + 10 * position + column for column in range(width)]


def event_of(chunk: Any) -> str:
    """Return the event of a chunk as vLLM's serving code makes it."""
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


def make_app(chunks: int = TOKENS) -> FastAPI:
    """Return an app that streams ``chunks`` events per choice and generates between them."""
    app = FastAPI()
    add_error_handler(app)
    app.state.args = SimpleNamespace()
    app.state.engine_client = FakeEngine()

    @app.post(COMPLETIONS)
    async def completions(body: Body) -> Any:
        extra = body.model_extra or {}
        params = apply_to_params(body, SamplingParams(n=extra.get("n", 1), max_tokens=TOKENS))
        samples = [Sample(params, i) for i in range(params.n)] if "readouts" in extra else []
        if not extra.get("stream"):
            for sample in samples * TOKENS:
                sample.step()
            return {"id": "x", "choices": [{"index": i, "text": "é\ud83d"[:1]} for i in range(params.n)]}

        async def events() -> AsyncIterator[str]:
            for i in range(len(samples) * extra.get("roles", 0)):  # chat completions begin all choices at once
                choice = ChatChoice(index=i, delta=ChatDelta(role="assistant", content=""), finish_reason=None)
                yield event_of(ChatChunk(id="x", created=1, model="m", choices=[choice]))
            for number in range(TOKENS):
                for i, sample in enumerate(samples):
                    sample.step()
                    if number < chunks:
                        reason = "length" if number == TOKENS - 1 else None
                        text = '"choices":[{"index":1'
                        choices = [CompletionChoice(index=i, text=text, finish_reason=reason)]
                        yield event_of(CompletionChunk(id="x", created=1, model="m", choices=choices))
            yield DONE

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post(RESPONSES)
    async def responses(body: ResponsesRequest) -> Any:
        params = apply_to_params(body, SamplingParams(max_tokens=TOKENS))
        for _ in range((body.model_extra or {}).get("runs", 1)):  # further ones follow calls of tools
            sample = Sample(params, 0)
            for _ in range(0 if body.stream else TOKENS):
                sample.step()
        if not body.stream:
            return {"id": "x", "output": []}

        async def events() -> AsyncIterator[str]:
            for _ in range(TOKENS):
                sample.step()
                yield 'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n'
            yield 'event: response.completed\ndata: {"type":"response.completed"}\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")

    app.add_middleware(SteeringMiddleware)
    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a stream; strict, so that a damaged event fails."""
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the readouts of several events."""
    found: dict[str, Any] = {name: {"positions": [], "values": []} for name in READOUTS}
    for part in parts:
        for name, values in part.get("readouts", {}).items():
            for key in ("positions", "values"):
                found[name][key] += values[key]
    return found


def expected(sample: int = 0) -> dict[str, Any]:
    """Return the readouts of a whole sample. The last token has no record."""
    last = PROMPT + TOKENS - 1

    def values(positions: range, columns: slice) -> list[list[float]]:
        return [record(sample, position, 5)[columns] for position in positions]

    return {
        "score": {
            "positions": list(range(PROMPT, last)),
            "values": [each for (each,) in values(range(PROMPT, last), slice(1, 2))],
        },
        "all": {"positions": list(range(last)), "values": [each for (each,) in values(range(last), slice(2, 3))]},
        "two": {"positions": [2, 3], "values": values(range(2, 4), slice(3, 5))},
    }


async def test_json_response_has_all_readouts() -> None:
    """Catches values of another sample, token or column, and a changed rest of the response."""
    response = await client_of(make_app()).post(COMPLETIONS, json={"readouts": READOUTS, "n": 2})
    assert response.status_code == 200, response.text
    assert int(response.headers["content-length"]) == len(response.content)
    document = response.json()
    assert document["id"] == "x"
    for number, choice in enumerate(document["choices"]):
        assert (choice["index"], choice["text"]) == (number, "é")
        assert choice["readouts"] == expected(number)
        assert list(choice["readouts"]) == list(READOUTS)
        assert "steering_trace" not in choice
        for values in choice["readouts"].values():
            msgspec.convert(values, ReadoutValuesForm)


async def test_stream_has_the_readouts_of_its_tokens() -> None:
    """Catches values that come late, twice, under another choice, or not at all."""
    response = await client_of(make_app()).post(COMPLETIONS, json={"readouts": READOUTS, "n": 2, "stream": True})
    assert response.text.endswith(DONE)
    choices = [event["choices"][0] for event in events_of(response.text)]
    assert len(choices) == 2 * TOKENS
    for number in range(2):
        own = [choice for choice in choices if choice["index"] == number]
        # An event has the values of the tokens ahead of its own, which has just been sampled.
        assert [choice.get("readouts", {}).get("score", {}).get("positions") for choice in own] == [None, [3], [4], [5]]
        assert joined(own) == expected(number)


async def test_stream_that_begins_a_choice_before_its_prompt_has_run() -> None:
    """Catches prompt readouts that are lost if a chat stream begins all choices when the first one has an output."""
    body = {"readouts": READOUTS, "n": 2, "stream": True, "roles": 1}
    response = await client_of(make_app()).post(COMPLETIONS, json=body)
    choices = [choice for event in events_of(response.text) for choice in event["choices"]]
    assert len(choices) == 2 * (1 + TOKENS)
    for number in range(2):
        assert joined([choice for choice in choices if choice["index"] == number]) == expected(number)


async def test_stream_without_enough_events_ends_with_the_rest() -> None:
    """Catches values that are lost if a route sends fewer events, such as for tool calls."""
    response = await client_of(make_app(chunks=1)).post(
        COMPLETIONS, json={"readouts": READOUTS, "n": 2, "stream": True}
    )
    *_, last = events_of(response.text)
    assert last["object"] == "readouts"
    assert [choice["index"] for choice in last["choices"]] == [0, 1]
    choices = [choice for event in events_of(response.text) for choice in event["choices"]]
    for number in range(2):
        assert joined([choice for choice in choices if choice["index"] == number]) == expected(number)


async def test_responses_route() -> None:
    """Catches readouts of the responses API at another place than documented."""
    client = client_of(make_app())
    body = {"input": "x", "readouts": READOUTS}
    whole = (await client.post(RESPONSES, json=body)).json()
    assert whole["readouts"] == expected()
    stream = await client.post(RESPONSES, json={**body, "stream": True})
    events = events_of(stream.text)
    assert joined(events) == expected()
    assert events[1]["readouts"]["score"]["positions"] == [3]
    assert [event["type"] for event in events[-2:]] == ["response.output_text.delta", "response.completed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_trace_of_all_generated_tokens(stream: bool) -> None:
    """Catches a trace that lacks tokens of earlier events, has tokens of the prompt, or reads another column.

    The factor of an edit at tokens that it does not cover has no effect there, and is 0.
    """
    edit = {"kind": "add", "point": "post_block", "layers": 2, "vector": [1.0] * HIDDEN}
    gated = {**edit, "when": {"readout": "score", "above": 0.0}, "tokens": [[4, 5]]}
    fields = {"readouts": READOUTS, "steering": [{**edit, "live": "calm"}, gated]}
    response = await client_of(make_app()).post(COMPLETIONS, json={**fields, "n": 2, "stream": stream})
    parts = events_of(response.text) if stream else [response.json()]
    choices = [choice for part in parts for choice in part["choices"] if "steering_trace" in choice]
    program = program_of(SteeredParams(**fields))
    assert program is not None and [choice["index"] for choice in choices] == [0, 1]
    (gate,), live = program.layout.gates.values(), program.layout.live["calm"]
    for number, choice in enumerate(choices):
        trace = choice["steering_trace"]
        factors = [record(number, position, program.layout.width) for position in range(PROMPT, PROMPT + TOKENS - 1)]
        assert trace["positions"] == [3, 4, 5] and trace["live"] == {"calm": [each[live] for each in factors]}
        assert trace["gates"] == [[0.0], [factors[1][gate]], [0.0]]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_trace_of_several_runs(stream: bool) -> None:
    """Catches the trace of the last run as that of all runs, with server-side tools."""
    client = client_of(make_app())
    edit = {"kind": "add", "point": "post_block", "layers": 1, "vector": [1.0] * HIDDEN, "live": "calm"}
    for runs in (1, 2):
        response = await client.post(RESPONSES, json={"input": "x", "steering": [edit], "runs": runs, "stream": stream})
        assert response.status_code == 200, response.text
        parts = events_of(response.text) if stream else [response.json()]
        (trace,) = [part["steering_trace"] for part in parts if "steering_trace" in part]
        assert (
            ("error" not in trace and trace["live"] == {"calm": trace["live"]["calm"]})
            if runs == 1
            else (set(trace) == {"error"} and "several times" in trace["error"])
        )
        msgspec.convert(trace, TraceForm)


async def test_plain_requests_are_unchanged() -> None:
    """Catches fields in responses of requests without readouts."""
    response = await client_of(make_app()).post(COMPLETIONS, json={})
    assert response.json() == {"id": "x", "choices": [{"index": 0, "text": "é"}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"readouts": {"p": {**PROBE, "layer": 99}}}, "readouts.p.layer"),
        ({"readouts": {"p": {**PROBE, "probe": [1.0, "x"]}}}, "readouts.p.probe[1]"),
        ({"readouts": {"p": {**PROBE, "probe": [1.0]}}}, "readouts.p"),
        ({"readouts": {"p": {**PROBE, "probe": "no/probe"}}}, "readouts.p.probe"),
        ({"readouts": {"p": {"point": "post_block", "layer": 1}}}, "readouts.p"),
        ({"readouts": {"p": {**PROBE, "scale": 1}}}, "readouts.p"),
        ({"readouts": []}, "readouts"),
        ({"stop_on": [{"readout": "p", "above": 1.0}]}, "stop_on[0].readout"),
        ({"readouts": {"p": PROBE}, "stop_on": [{"readout": "p", "above": 1.0, "tokens": 0}]}, "stop_on[0].tokens"),
        ({"readouts": {"p": PROBE}, "stop_on": [{"readout": "q", "above": 1.0}]}, "stop_on[0].readout"),
        ({"readout": {"p": PROBE}}, "readout"),
        ({"stop_ons": [{"readout": "p", "above": 1.0}]}, "stop_ons"),
        ({"extra_body": {"readouts": {"p": PROBE}}}, "extra_body.readouts"),
        ({"extra_body": {"stop_on": [{"readout": "p"}]}}, "extra_body.stop_on"),
    ],
)
async def test_refused(fields: dict[str, Any], param: str) -> None:
    """Catches invalid or misplaced fields that are ignored, and errors without the field's path."""
    response = await client_of(make_app()).post(COMPLETIONS, json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "text",
    [
        '{"readouts": {"p": {"layer": 1, "layer": 2}}}',
        '{"readouts": {"p": {"projections": [{"data": 1, "data": 2}]}}}',
        '{"stop_on": [{"above": 1, "above": 2}]}',
        '{"steering": [{"when": [{"above": 1, "above": 2}]}]}',
    ],
)
async def test_duplicate_keys_are_refused(text: str) -> None:
    """Catches one of two values being taken and the other ignored."""
    response = await client_of(make_app()).post(COMPLETIONS, content=text, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "twice" in response.json()["error"]["message"]


async def test_background_responses_are_refused() -> None:
    """Catches readouts whose values no response would carry."""
    body = {"input": "x", "readouts": READOUTS, "background": True}
    response = await client_of(make_app()).post(RESPONSES, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "readouts")

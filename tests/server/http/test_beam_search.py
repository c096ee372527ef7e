# SPDX-License-Identifier: Apache-2.0
"""Beam search over HTTP: refused with steering fields, and with settings of the server that beams would not follow."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.datastructures import UploadFile
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
from vllm.sampling_params import SamplingParams

from tests.server.application import add_error_handler
from tests.server.fakes import FakeEngine, engine_context, vector
from vllm_steer.frontend import context as contexts
from vllm_steer.frontend.context import EngineContext
from vllm_steer.frontend.requests import complete_params
from vllm_steer.params import APPLIED_KEY, PROGRAM_KEY
from vllm_steer.plugin.entry_point import wrap_front_end
from vllm_steer.server.http.apply_fields import RequestRefused, add_request
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_context import RequestContext, current_request

SITE = {"post_block": {"1": vector()}}
ABLATE = {"kind": "ablate", "point": "post_block", "layers": 1, "vector": vector()}
REQUESTS: dict[type[Any], dict[str, Any]] = {
    CompletionRequest: {"prompt": "hi"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "hi"}]},
    TranscriptionRequest: {"file": UploadFile(BytesIO())},
    TranslationRequest: {"file": UploadFile(BytesIO())},
}
classes = pytest.mark.parametrize("of", list(REQUESTS), ids=lambda of: of.__name__)


def search(of: type[Any] = CompletionRequest, **fields: Any) -> Any:
    """Make the parameters of a beam search as vLLM does."""
    wrap_front_end()
    return of.model_validate({**REQUESTS[of], "use_beam_search": True, "n": 2, **fields}).to_beam_search_params(4, {})


@pytest.fixture
def engine() -> Iterator[EngineContext]:
    """Return the engine of the current request."""
    engine = engine_context()
    token = current_request.set(RequestContext(engine=engine))
    yield engine
    current_request.reset(token)


@pytest.mark.parametrize("of", [CompletionRequest, ChatCompletionRequest])
def test_rejects_fields(of: type[Any]) -> None:
    """Catches beams that are made without the request's edits."""
    with pytest.raises(RequestRefused, match="beam search"):
        search(of, steering=[ABLATE])
    search(of, steering=None)


@classes
@pytest.mark.parametrize(
    ("steering", "served"),
    [
        ({}, True),
        ({"base": SITE}, True),
        ({"edits": [ABLATE]}, True),
        ({"decode": SITE}, False),
        ({"prefill": SITE}, False),
        ({"base": SITE, "edits": [{**ABLATE, "tokens": "last_prompt"}]}, False),
        ({"edits": [{**ABLATE, "tokens": [[3, None]]}]}, False),
    ],
)
def test_global_steering(of: type[Any], steering: dict[str, Any], served: bool, engine: EngineContext) -> None:
    """Catches (1) edits of generated or of prompt tokens that act on the wrong tokens of beams, (2) others refused."""
    engine.registry.set(**(steering or {"base": SITE}))
    if not steering:
        engine.registry.clear()
    if served:
        search(of)
        return
    with pytest.raises(RequestRefused, match="global steering has edits of some tokens") as refused:
        search(of)
    assert refused.value.parameter == "use_beam_search"


def test_server_wide_captures() -> None:
    """Catches one captured request for each step of each beam."""
    engine = engine_context({"logging": {"hooks": {"post_block": [1]}}})
    token = current_request.set(RequestContext(engine=engine))
    try:
        with pytest.raises(RequestRefused, match="server-wide captures"):
            search()
    finally:
        current_request.reset(token)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_routes_know_the_engine(route: str) -> None:
    """Catches a route that does not look at global steering."""
    client_engine, engine = FakeEngine(), engine_context()
    setattr(client_engine.input_processor, contexts._CONTEXT, engine)
    app = FastAPI()
    add_error_handler(app)
    app.state.engine_client = client_engine

    @app.post(route)
    async def serve() -> dict[str, bool]:
        search()
        return {"served": True}

    app.add_middleware(SteeringMiddleware)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
    assert (await client.post(route)).json() == {"served": True}
    engine.registry.set(decode=SITE)
    refused = await client.post(route)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "use_beam_search")


@pytest.mark.parametrize("steering", [{"base": SITE}, None])
async def test_steps_get_the_global_steering_of_the_start(steering: dict[str, Any] | None) -> None:
    """Catches beams whose later steps get global steering that was not checked, or that the first ones lack."""
    engine, made = engine_context(), []

    async def add(_engine: Any, request_id: str, prompt: Any, params: Any) -> None:
        made.append(complete_params(engine, params).extra_args or {})

    if steering is not None:
        engine.registry.set(**steering)
    shared = SamplingParams(max_tokens=1)
    token = current_request.set(RequestContext(engine=engine))
    try:
        await add_request(add, None, "a sample", None, shared)
        search()
        for step in range(3):
            await add_request(add, None, f"step {step}", None, shared)
            engine.registry.set(decode=SITE)
    finally:
        current_request.reset(token)
    assert [each.get(PROGRAM_KEY) for each in made] == [made[0].get(PROGRAM_KEY)] * 4
    assert (PROGRAM_KEY in made[0]) == (steering is not None)
    if steering is not None:
        assert [msgspec.json.decode(each[APPLIED_KEY])["epoch"] for each in made] == [1] * 4
    assert shared.extra_args is None

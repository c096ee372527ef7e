# SPDX-License-Identifier: Apache-2.0
"""Live strengths of a real server over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.server import HIDDEN, MODEL, run_server
from tests.server.test_server_capture import CHAT, COMPLETIONS
from vllm_steer import Client, ServerError

PUSH = (np.random.default_rng(5).standard_normal(HIDDEN) * 16).astype(np.float32).tolist()
RESPONSES = "/v1/responses"
SITE = {"point": "post_block", "layer": 2}
STEERING = [{"kind": "add", "point": "post_block", "layers": 2, "vector": PUSH, "tokens": "generated", "live": "calm"}]
# A stream lasts until its strength is changed, however busy the machine is: the probe is large until then.
UNTIL_CHANGED = {
    "steering": STEERING,
    "readouts": {"pushed": {"probe": PUSH, **SITE, "positions": "generated"}},
    "stop_on": [{"readout": "pushed", "below": 0.0}],
}
TOKENS = 8000
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--enable-steering", "--max-model-len", "8192"]
    yield from run_server(model, flags, tmp_path_factory.mktemp("log") / "server.log", warm=True)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def stream(client: httpx.Client, path: str, headers: dict[str, str], own_id: str | None, **body: Any) -> Any:
    """Run a stream, change the strength after its first text, and return the confirmation and the trace."""
    answer, trace = None, None
    with client.stream("POST", path, json={**BODY, **body, **UNTIL_CHANGED}, headers=headers) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            request_id = own_id or event.get("response", event).get("id")
            if event.get("type", "") == "response.created":  # has the id, which later events of this route lack
                own_id = request_id
            if answer is None and ("type" not in event or event["type"] == "response.output_text.delta"):
                answer = client.post(f"/v1/steering/requests/{request_id}", json={"calm": -0.5})
                assert answer.status_code == 200, answer.text
            for choice in event.get("choices", (event,)):
                trace = choice.get("steering_trace", trace)
    assert answer is not None
    return answer.json(), trace


PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once"},
    CHAT: {"messages": [{"role": "user", "content": "Once"}]},
    RESPONSES: {"input": "Once", "max_output_tokens": TOKENS},
}


@pytest.mark.parametrize(("own_id", "in_body"), [(None, False), ("job-7_1", False), ("job-8_1", True)])
@pytest.mark.parametrize("path", list(PROMPTS))
def test_change_over_http(client: httpx.Client, path: str, own_id: str | None, in_body: bool) -> None:
    """Catches a live strength that stays constant over HTTP, and a confirmed position that differs from the trace.

    Also catches an id of the client that does not find its request.
    """
    asked = PROMPTS[path] | ({"request_id": own_id} if in_body else {})
    headers = {"x-request-id": own_id} if own_id is not None and not in_body else {}
    confirmed, trace = stream(client, path, headers, own_id, **asked)
    assert confirmed["strengths"] == {"calm": -0.5}
    first = confirmed["position"]
    strengths = dict(zip(trace["positions"], trace["live"]["calm"], strict=True))
    assert strengths == {position: -0.5 if position >= first else 1.0 for position in strengths}
    assert set(strengths.values()) == {1.0, -0.5}


def test_refused_changes(url: str) -> None:
    """Catches a change of an unknown or ended request that is confirmed, and errors without a remedy."""
    with Client(url) as client:

        def begin(tokens: int) -> Any:
            return client.stream_chat(
                [{"role": "user", "content": "Once"}], max_tokens=tokens, ignore_eos=True, steering=STEERING
            )

        for strengths, field in (({"clam": 1.0}, "clam"), ({}, "strengths"), ({"calm": True}, "calm")):
            with closing(begin(TOKENS)) as pieces, pytest.raises(ServerError) as wrong:
                client.set_strength(next(pieces).id, **strengths)
            assert (wrong.value.status, wrong.value.param) == (400, field)
        *_, last = begin(5)
        with pytest.raises(ServerError, match="has ended") as ended:
            client.set_strength(last.id, calm=1.0)
        assert ended.value.status == 409
        with pytest.raises(ServerError, match="use the id of its response") as unknown:
            client.set_strength("other", calm=1.0)
        assert unknown.value.status == 404

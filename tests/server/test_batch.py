# SPDX-License-Identifier: Apache-2.0
"""``vllm run-batch``: vLLM's functions with a fake engine, and the real command."""

from __future__ import annotations

import base64
import inspect
import json
import subprocess
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.entrypoints.launchers import run_batch
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse

from tests.server.fakes import FakeEngine, engine_context, vector
from tests.server.http.answers import SPEC, captured, done, finish_samples
from tests.server.http.test_registry_queries import RemoteStore
from tests.server.server import HIDDEN, MODEL, VLLM_COMMAND, environment
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.frontend import context as contexts
from vllm_steer.frontend.reach import Unreached
from vllm_steer.plugin.entry_point import wrap_front_end
from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.registry.storage import MemoryStore
from vllm_steer.request import Selector
from vllm_steer.server import batch
from vllm_steer.server.http.request_context import current_request

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
FIELD = {"post_block": {"1": vector()}}


async def responses_to(
    lines: list[tuple[str, dict[str, Any]]],
    *,
    data: Any = None,
    unreached: Unreached = (),
    engine: FakeEngine | None = None,
    **flags: int,
) -> list[Any]:
    """Return the responses of ``run_batch`` to lines (url, body); the fake handlers accept any body.

    Steered lines have the edits in ``unreached`` that no token reached.
    """
    wrap_front_end()
    requests = [
        run_batch.BatchRequestInput(custom_id=str(i), method="POST", url=url, body=body)
        for i, (url, body) in enumerate(lines)
    ]

    async def handler(body: Any) -> Any:
        if isinstance(body, ChatCompletionRequest):
            await finish_samples(body, [{"memory": done(captured() if data is None else data)}])
            context = current_request.get()
            if context is not None and context.fields_applied:
                context.unreached[0] = unreached
        message = {"role": "assistant", "content": "yes"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 1, "total_tokens": 2}
        return ChatCompletionResponse(model="tiny", choices=choices, usage=usage)

    made: list[Any] = []

    async def all_lines(engine_client: Any, args: Any) -> None:
        # vLLM 0.33's function takes no tracker of the progress.
        takes_tracker = "tracker" in inspect.signature(run_batch.run_request).parameters
        rest = (run_batch.BatchProgressTracker(),) if takes_tracker else ()
        made.extend([await run_batch.run_request(handler, request, *rest) for request in requests])

    await batch.run(all_lines, FakeEngine() if engine is None else engine, Namespace(**flags))
    return [json.loads(answer.model_dump_json()) for answer in made]


async def test_captured_rows_are_in_the_line() -> None:
    """Catches captures that are lost, and rows in another line."""
    lines = [(CHAT, {"messages": MESSAGES, "capture": {"memory": SPEC}}), (CHAT, {"messages": MESSAGES})]
    first, second = await responses_to(lines)
    (choice,) = first["response"]["body"]["choices"]
    assert choice["capture_results"]["memory"]["sites"]["post_block"]["1"]["positions"] == [0, 1, 2]
    assert "capture_results" not in second["response"]["body"]["choices"][0]


async def test_reports_rows_too_large_for_a_line() -> None:
    """Catches lines of unlimited size, and an id that no server can resolve."""
    lines = [(CHAT, {"messages": MESSAGES, "capture": {"memory": SPEC}})]
    (answer,) = await responses_to(lines, data=captured(5000), capture_inline_kib=8)
    result = answer["response"]["body"]["choices"][0]["capture_results"]["memory"]
    assert result["status"] == "error"
    assert "--capture-inline-kib" in result["error"]
    assert "id" not in result


async def test_lines_report_the_applied_steering() -> None:
    """Catches a line without `steering_applied`, one with another line's, and edits that acted nowhere unreported."""
    edits = [
        {"kind": "add", "point": "post_block", "layers": 1, "vector": vector(), "tokens": "generated"},
        {"kind": "add", "point": "post_block", "layers": 2, "vector": vector(), "strength": 0.0},
    ]
    lines = [(CHAT, {"messages": MESSAGES, "steering": edits}), (CHAT, {"messages": MESSAGES})]
    steered, plain = await responses_to(lines, unreached=(("steering[0]", Selector("generated")),))
    applied = steered["response"]["body"]["steering_applied"]
    assert applied["request"] is not None
    assert [each["edit"] for each in applied["no_effect"]] == ["steering[1]", "steering[0]"]
    assert "steering_applied" not in plain["response"]["body"]


async def test_refuses_to_store() -> None:
    """Catches an error that recommends a flag which cannot help, after the line has run."""
    specs = [{"memory": {**SPEC, "store": store}} for store in (True, False)]
    refused, inline = await responses_to([(CHAT, {"messages": MESSAGES, "capture": spec}) for spec in specs])
    error = refused["error"]["error"]
    assert (error["code"], error["param"]) == (400, "capture.memory.store")
    assert "capture to files" in error["message"]
    assert "sites" in inline["response"]["body"]["choices"][0]["capture_results"]["memory"]


OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
    "/v1/score": {"model": "tiny", "queries": "a", "documents": "b"},
    "/v1/rerank": {"model": "tiny", "query": "a", "documents": ["b"]},
    "/v1/audio/transcriptions": {"model": "tiny", "file_url": "data:audio/wav;base64,AAAA"},
    "/v1/audio/translations": {"model": "tiny", "file_url": "data:audio/wav;base64,AAAA"},
}


@pytest.mark.parametrize("url", list(OTHERS))
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"steering_vectors": FIELD}, "steering_vectors"),
        ({"capture": {"memory": SPEC}}, "capture"),
        ({"steering_vector": FIELD}, "steering_vector"),
        ({"extra_body": {"capture": {"memory": SPEC}}}, "extra_body.capture"),
    ],
)
async def test_refuses_fields_for_other_urls(url: str, fields: dict[str, Any], param: str) -> None:
    """Catches fields that are ignored for other URLs; without fields such a line passes."""
    refused, plain = await responses_to([(url, {**OTHERS[url], **fields}), (url, OTHERS[url])])
    assert refused["response"]["status_code"] == 400
    assert refused["error"]["error"]["param"] == param
    assert plain["error"] is None


async def test_wrong_fields_fail_only_their_line() -> None:
    """Catches a wrong line that is ignored, or that fails other lines."""
    wrong = {"messages": MESSAGES, "capture": {"memory": {"hooks": {"post_block": [99]}}}}
    bad, good = await responses_to([(CHAT, wrong), (CHAT, {"messages": MESSAGES, "capture": {"memory": SPEC}})])
    assert bad["response"]["status_code"] == 400
    assert bad["error"]["error"]["param"] == "capture.memory.hooks.post_block"
    assert good["error"] is None


@pytest.mark.parametrize("fields", [{}, {"steering_modules": ["calm"]}])
async def test_the_event_loop_does_not_query_the_registry(fields: dict[str, Any]) -> None:
    """Catches a line that stops all others while it waits for the database, and one that loses its module."""
    store = RemoteStore()
    context = engine_context(store=store)
    context.registry.register("calm", base={"post_block": {1: vector()}})
    engine = FakeEngine()
    setattr(engine.input_processor, contexts._CONTEXT, context)
    store.threads.clear()
    (answer,) = await responses_to([(CHAT, {"messages": MESSAGES, **fields})], engine=engine)
    assert answer["error"] is None
    assert ("steering_applied" in answer["response"]["body"]) is bool(fields)
    assert store.threads and threading.current_thread() not in store.threads


async def test_reports_a_registry_that_cannot_be_read() -> None:
    """Catches an internal error without the reason, and a line answered without the module that it names."""

    class Lost(MemoryStore):
        is_remote = True

        def is_stale(self) -> bool:
            raise RegistryUnavailableError("registry", "the database is down")

    context = engine_context()
    engine = FakeEngine()
    setattr(engine.input_processor, contexts._CONTEXT, context)
    context.registry._store = Lost()
    (answer,) = await responses_to([(CHAT, {"messages": MESSAGES, "steering_modules": ["calm"]})], engine=engine)
    error = answer["error"]["error"]
    assert (error["code"], error["param"]) == (400, "registry")
    assert "the database is down" in error["message"]


def test_the_run_batch_command(model: Path, tmp_path: Path) -> None:
    """Catches wraps of functions that the command does not call, and files left incomplete at its end."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    memory = {"memory": {"hooks": {"post_block": [1]}, "positions": "last_prompt"}}
    edits = [{"kind": "add", "point": "post_block", "layers": 1, "vector": [3.0] * HIDDEN}]
    lines = [
        {**body, "capture": {**memory, "filesystem": memory["memory"]}},
        {**body, "capture": memory, "steering": edits},
        {**body, "capture": {"memory": {"hooks": {"post_block": [9]}}}},
    ]
    given = [{"custom_id": str(i), "method": "POST", "url": CHAT, "body": line} for i, line in enumerate(lines)]
    given.append(
        {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "hi", "capture": memory}}
    )
    (tmp_path / "in").write_text("\n".join(map(json.dumps, given)))
    command = [*VLLM_COMMAND, "run-batch", "-i", tmp_path / "in", "-o", tmp_path / "out", "--model", model]
    command += ["--served-model-name", MODEL, "--enforce-eager", "--dtype", "float32", "--max-model-len", "256"]
    command += ["--enable-steering", "--capture-consumers", f"filesystem:root={tmp_path / 'acts'},layout=packed"]
    ran = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    plain, steered, wrong, other = map(json.loads, (tmp_path / "out").read_text().splitlines())
    rows = []
    for line in (plain, steered):
        site = line["response"]["body"]["choices"][0]["capture_results"]["memory"]["sites"]["post_block"]["1"]
        rows.append(np.frombuffer(base64.b64decode(site["data"]), "<f4"))
    np.testing.assert_allclose(rows[1] - rows[0], 3.0, atol=2e-3)
    assert steered["response"]["body"]["steering_applied"]["request"] is not None
    assert "steering_applied" not in plain["response"]["body"]
    (stored,) = open_captures(tmp_path / "acts")
    np.testing.assert_array_equal(stored.numpy("post_block", 1)[0], rows[0])
    assert wrong["error"]["error"]["param"] == "capture.memory.hooks.post_block"
    # A model that generates has no embeddings: vLLM's own error comes first.
    assert "embeddings" in json.dumps(other["error"])

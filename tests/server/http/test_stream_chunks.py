# SPDX-License-Identifier: Apache-2.0
"""Chunks of streams equal those of vLLM's own classes, byte for byte."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, UsageInfo
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls

from vllm_steer.server.http import stream_chunks as ours

STOCK = SimpleNamespace(
    CompletionChunk=completion.CompletionStreamResponse,
    CompletionChoice=completion.CompletionResponseStreamChoice,
    ChatChunk=chat.ChatCompletionStreamResponse,
    ChatChoice=chat.ChatCompletionResponseStreamChoice,
    ChatDelta=DeltaMessage,
)
TEXTS = ["a", "", '\x00\x01\x1f\x7f"\\/\b\f\n\r\t', "\u00e9\u4e2d\U0001f600\u2028\u2029\ufeff", "<script>&'"]
NEWER = {"weight_versions", "kv_transfer_params"}
"""Fields that vLLM gives since 0.33, in every chunk."""
HEAD = {"id": "x-1", "created": 1_700_000_000, "model": "m/\u00e9"}
TOP = [{"a": -1e-5, "b": -0.1}, None]
LOGPROBS = completion.CompletionLogProbs(
    text_offset=[0], token_logprobs=[-1e-7, None, -9999.0], tokens=["a"], top_logprobs=TOP
)
CHAT_LOGPROBS = chat.ChatCompletionLogProbs(
    content=[chat.ChatCompletionLogProbsContent(token="a", logprob=-3.3e-8, bytes=[97], top_logprobs=[])]
)
CALL = DeltaToolCall(index=0, id="call-1", function=DeltaFunctionCall(name="f", arguments='{"a": 1}'))


def newer(name: str) -> dict[str, Any]:
    """Return the newer fields that this vLLM gives to a class, as in most chunks."""
    return {field: None for field in getattr(STOCK, name).model_fields if field in NEWER}


USAGE = UsageInfo(prompt_tokens=3, completion_tokens=2, total_tokens=5)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"finish_reason": "stop", "stop_reason": 5},
        {"finish_reason": "length", "stop_reason": 'x"\u00e9'},
        {"token_ids": [1, 2], "prompt_token_ids": []},
        {"logprobs": LOGPROBS},
    ],
)
def test_completion_chunks(text: str, more: dict[str, Any]) -> None:
    """Catches escapes, nulls, an order of fields, or numbers that differ from vLLM's."""

    def dumped(classes: Any, usage: Any = None) -> str:
        fields = {"logprobs": None, "finish_reason": None, "stop_reason": None, "token_ids": None, **more}
        choice = classes.CompletionChoice(index=1, text=text, **fields, **newer("CompletionChoice"))
        chunk = classes.CompletionChunk(object="text_completion", choices=[choice], **HEAD, **newer("CompletionChunk"))
        if usage is not None:
            chunk.usage, chunk.system_fingerprint = usage, "f"
        return str(chunk.model_dump_json(exclude_unset=True))

    assert dumped(ours) == dumped(STOCK)
    assert dumped(ours, USAGE) == dumped(STOCK, USAGE)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["role", "content", "empty", "parts", "reasoning", "tool"])
@pytest.mark.parametrize("more", [{}, {"finish_reason": "stop", "stop_reason": None}, {"logprobs": CHAT_LOGPROBS}])
def test_chat_chunks(text: str, kind: str, more: dict[str, Any]) -> None:
    """Catches deltas of parsers, roles or log-probabilities that differ from vLLM's."""

    def dumped(classes: Any) -> str:
        delta = {
            "role": lambda: classes.ChatDelta(role="assistant", content=""),
            "content": lambda: classes.ChatDelta(content=text),
            "empty": lambda: classes.ChatDelta(),
            "parts": lambda: classes.ChatDelta(content=text),
            "reasoning": lambda: DeltaMessage(reasoning=text),
            "tool": lambda: DeltaMessage(content=None, tool_calls=[CALL]),
        }[kind]()
        choice = classes.ChatChoice(
            index=0, delta=delta, **{"logprobs": None, "finish_reason": None, **more, **newer("ChatChoice")}
        )
        chunk = classes.ChatChunk(
            object="chat.completion.chunk", choices=[choice], prompt_token_ids=None, prompt_text=text, **HEAD,
            **newer("ChatChunk"),
        )  # fmt: skip
        return str(chunk.model_dump_json(exclude_unset=True))

    assert dumped(ours) == dumped(STOCK)


@pytest.mark.parametrize("exclude_unset", [False, True])
def test_chunk_with_the_usage(exclude_unset: bool) -> None:
    """Catches nulls or a missing object in the last chunk."""

    def dumped(classes: Any, name: str, **more: Any) -> str:
        chunk = getattr(classes, name)(choices=[], usage=USAGE, system_fingerprint=None, metrics=None, **HEAD, **more)
        return str(chunk.model_dump_json(exclude_unset=exclude_unset, exclude_none=True))

    for name, more in (("CompletionChunk", {}), ("ChatChunk", {"object": "chat.completion.chunk"})):
        assert dumped(ours, name, **more) == dumped(STOCK, name, **more)


def test_parallel_tool_calls_are_filtered() -> None:
    """Catches vLLM's filter, which knows its own class only, failing or keeping further calls."""
    second = CALL.model_copy(update={"index": 1})
    choice = ours.ChatChoice(index=0, delta=DeltaMessage(tool_calls=[CALL, second]))
    kept: Any = maybe_filter_parallel_tool_calls(choice, SimpleNamespace(parallel_tool_calls=False))  # type: ignore[arg-type, type-var]
    assert kept.delta.tool_calls == [CALL]
    plain = ours.ChatChoice(index=0, delta=ours.ChatDelta(content="a"))
    assert maybe_filter_parallel_tool_calls(plain, SimpleNamespace(parallel_tool_calls=False)) is plain  # type: ignore[arg-type, type-var]


@pytest.mark.parametrize(
    ("serving", "names"),
    [
        (
            completion_serving,
            {"CompletionStreamResponse": "CompletionChunk", "CompletionResponseStreamChoice": "CompletionChoice"},
        ),
        (
            chat_serving,
            {
                "ChatCompletionStreamResponse": "ChatChunk",
                "ChatCompletionResponseStreamChoice": "ChatChoice",
                "DeltaMessage": "ChatDelta",
            },
        ),
    ],
)
def test_fields_that_the_serving_code_gives(serving: Any, names: dict[str, str]) -> None:
    """Catches a version of vLLM that gives or reads a field that our classes do not have."""
    tree = ast.parse(inspect.getsource(serving))
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "delta_message"
    }
    assert not {name for name in read if not hasattr(ours.ChatDelta(content="a"), name)}
    found: dict[str, set[str]] = {name: set() for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            assert not node.args
            found[node.func.id] |= {str(each.arg) for each in node.keywords}
    for name, ours_name in names.items():
        known = set(getattr(ours, ours_name).__struct_fields__)
        assert found[name] <= known, name
        assert known - NEWER - {"readouts", "steering_trace"} <= set(getattr(STOCK, ours_name).model_fields), name

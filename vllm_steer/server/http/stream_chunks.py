# SPDX-License-Identifier: Apache-2.0
"""Chunks of streamed completions and chat completions, in place of vLLM's classes of the same names.

vLLM's serving code builds one chunk per event as a pydantic model and dumps it. With steering on, the names in its
modules are these classes instead: msgspec structs whose JSON is equal to that of vLLM's classes, byte for byte, and
which can carry readouts as fields of a choice. A field that the serving code does not give is :data:`msgspec.UNSET`
and absent from the JSON, as with pydantic's ``exclude_unset``. Values that are pydantic models, such as
log-probabilities, usage, and the deltas of parsers, are dumped by pydantic.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from vllm_steer.compat.internals import (
    ChatCompletionStreamResponse,
    CompletionStreamResponse,
)
from vllm_steer.server.http.request_context import current_request


def _dump_model(value: Any) -> Raw:
    """Return the JSON of a pydantic model without its unset fields, as vLLM dumps models within a chunk."""
    return Raw(value.model_dump_json(exclude_unset=True).encode())


_encoder = msgspec.json.Encoder(enc_hook=_dump_model)


class _Choice(msgspec.Struct, kw_only=True):
    readouts: Raw | UnsetType = UNSET
    steering_trace: Raw | UnsetType = UNSET
    index: int


class CompletionChoice(_Choice, kw_only=True):
    """A choice of a completion's chunk (vLLM's ``CompletionResponseStreamChoice``)."""

    text: str
    logprobs: Any = UNSET
    finish_reason: str | UnsetType | None = UNSET
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    weight_versions: Any = UNSET  # 0.33


class ChatDelta(msgspec.Struct, kw_only=True):
    """New part of a message (vLLM's ``DeltaMessage``), as the serving code makes it without a parser."""

    role: str | UnsetType | None = UNSET
    content: Any = UNSET

    @property
    def tool_calls(self) -> list[Any]:
        """No tool calls: parsers make the deltas that have some."""
        return []

    @property
    def reasoning(self) -> None:
        """No reasoning, for the log of ``--enable-log-outputs``."""


class ChatChoice(_Choice, kw_only=True):
    """A choice of a chat completion's chunk (vLLM's ``ChatCompletionResponseStreamChoice``)."""

    delta: Any
    logprobs: Any = UNSET
    finish_reason: str | UnsetType | None = UNSET
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    weight_versions: Any = UNSET  # 0.33

    @property
    def tool_calls(self) -> list[Any]:
        """Tool calls of the delta: vLLM's filter of parallel calls does not know this class and looks for them here."""
        calls: list[Any] = self.delta.tool_calls
        return calls

    @tool_calls.setter
    def tool_calls(self, calls: list[Any]) -> None:
        self.delta.tool_calls = calls


class _Chunk(msgspec.Struct, kw_only=True):
    stock: ClassVar[Any]

    id: str
    object: str | UnsetType = UNSET
    created: int
    model: str
    choices: list[Any]
    usage: Any = UNSET
    system_fingerprint: str | UnsetType | None = UNSET

    def model_dump_json(self, *, exclude_unset: bool = False, exclude_none: bool = False) -> str:
        """Return the JSON of the chunk as pydantic's method does, with new readouts of its choices."""
        if not exclude_unset or exclude_none:  # the chunk with the usage, once in a stream
            given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET}
            text: str = self.stock(**given).model_dump_json(exclude_unset=exclude_unset, exclude_none=exclude_none)
            return text
        context = current_request.get()
        if context is not None and context.readouts and context.results_in == "choices":
            for choice in self.choices:
                feed = context.readouts.get(choice.index)
                if feed is not None:
                    values, trace = feed.take_fields(last=choice.finish_reason is not None)
                    if values:
                        choice.readouts = Raw(values)
                    if trace:
                        choice.steering_trace = Raw(trace)
        return _encoder.encode(self).decode()


class CompletionChunk(_Chunk, kw_only=True):
    """An event of a streamed completion (vLLM's ``CompletionStreamResponse``)."""

    stock = CompletionStreamResponse

    metrics: Any = UNSET
    kv_transfer_params: Any = UNSET  # 0.33


class ChatChunk(_Chunk, kw_only=True):
    """An event of a streamed chat completion (vLLM's ``ChatCompletionStreamResponse``)."""

    stock = ChatCompletionStreamResponse

    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_text: str | UnsetType | None = UNSET
    metrics: Any = UNSET
    kv_transfer_params: Any = UNSET  # 0.33

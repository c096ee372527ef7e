# SPDX-License-Identifier: Apache-2.0
"""Texts in prompts whose tokens are parts of characters."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_steer import SteeringError
from vllm_steer.client.patching import HttpRunner
from vllm_steer.patching.axes import read_positions
from vllm_steer.patching.offline import LocalRunner, OfflineRunner
from vllm_steer.server.studies.runner import EngineRunner

PROMPT = "In 東京 🙂 of é"


def decode(tokens: Sequence[int]) -> str:
    """Return the text of tokens that are bytes."""
    return bytes(tokens).decode("utf-8", "replace")


def offline() -> OfflineRunner:
    runner = OfflineRunner.__new__(OfflineRunner)
    config = SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=False))
    LocalRunner.__init__(runner, config, None, lambda: SimpleNamespace(decode=decode))  # type: ignore[arg-type]
    return runner


def on_the_server() -> EngineRunner:
    config = SimpleNamespace(
        model_config=SimpleNamespace(skip_tokenizer_init=False), scheduler_config=SimpleNamespace(policy="fcfs")
    )
    engine: Any = SimpleNamespace(vllm_config=config, get_tokenizer=lambda: SimpleNamespace(decode=decode))
    return EngineRunner(engine, *[None] * 3)  # type: ignore[arg-type]


def over_http() -> HttpRunner:
    client: Any = SimpleNamespace(detokenize=decode)
    return HttpRunner(client)


@pytest.mark.parametrize("make", [offline, on_the_server, over_http])
def test_characters_of_several_tokens_are_found(make: Any) -> None:
    """Catches a text that is said not to occur in a prompt, and a span that ends within a character."""
    pieces = make().pieces(list(PROMPT.encode()))
    assert len(pieces) == len(PROMPT.encode())
    given = [{"span": text} for text in ("東京", "京", "🙂", "of é", "In")]
    assert read_positions(given, pieces) == ((3, 9), (6, 9), (10, 14), (15, 20), (0, 2))
    with pytest.raises(SteeringError, match="does not occur"):
        read_positions([{"span": "北"}], pieces)


def test_tokens_between_two_characters() -> None:
    """Catches a text found in a token that ends one character and begins the next, without the tokens around it."""
    data = "a東京b".encode()
    parts = [data[:1], data[1:3], data[3:5], data[5:7], data[7:]]
    runner = HttpRunner(SimpleNamespace(detokenize=lambda tokens: decode(b"".join(parts[i] for i in tokens))))  # type: ignore[arg-type]
    pieces = runner.pieces([0, 1, 2, 3, 4, 2])
    assert pieces[-1] == decode(parts[2])  # without the rest of its characters
    assert read_positions([{"span": "東"}, {"span": "b"}], pieces) == ((1, 4), (4, 5))

# SPDX-License-Identifier: Apache-2.0
"""``AsyncLLM``, whose engine runs in a process of its own: streams, and a reader that is slower than the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from vllm import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.captures import capture
from tests.tiny import direction
from vllm_steer import SamplingParams, SteeringError, engine_kwargs

PROMPT = {"prompt_token_ids": list(range(20, 40))}


async def generate(engine: Any, name: str, pause: float = 0.0, **fields: Any) -> tuple[list[int], Any]:
    """The tokens of a stream, piece by piece, and the capture results of its last piece."""
    params = SamplingParams(
        max_tokens=24,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **fields,
    )
    tokens: list[int] = []
    results = None
    async for output in engine.generate(PROMPT, params, name):
        tokens += output.outputs[0].token_ids
        results = output.capture_results or results
        if pause:
            await asyncio.sleep(pause)
            pause = 0.0
    return tokens, results


@pytest.fixture
async def engine(tiny_llama: Path) -> AsyncIterator[Any]:
    made = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(tiny_llama),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=128,
            **engine_kwargs(),
        )
    )
    yield made
    made.shutdown()


async def test_streams_are_steered_and_captured(engine: Any) -> None:
    """Catches a streamed route that runs unsteered, results lost where pieces are merged for a slow reader, and a
    refusal that does not reach the caller.
    """
    site = {"post_block": {1: direction(1)}}
    plain, steered, slow = await asyncio.gather(
        generate(engine, "plain"),
        generate(engine, "steered", steering_vectors=site, capture=capture()),
        generate(engine, "slow", pause=2.0, steering_vectors=site, capture=capture()),
    )
    assert len(plain[0]) == len(steered[0]) == 24
    assert plain[0] != steered[0]
    assert slow[0] == steered[0]
    assert plain[1] is None
    for _, results in (steered, slow):
        found = await asyncio.to_thread(results.__getitem__, "memory")
        assert found.status == "ok", found.error
        assert found.positions("post_block", 2).tolist() == list(range(43))
    with pytest.raises(SteeringError, match="layer 99"):
        await generate(engine, "bad", steering_vectors={"post_block": {99: direction(1)}})
    assert len((await generate(engine, "after"))[0]) == 24

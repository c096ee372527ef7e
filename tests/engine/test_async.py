# SPDX-License-Identifier: Apache-2.0
"""Tests of ``AsyncLLM``, whose engine runs in another process: streams, slow clients, sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from vllm import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind

from tests.engine.captures import capture
from tests.tiny import direction
from vllm_steer import AsyncLLM, SamplingParams, SteeringError, engine_kwargs, open_captures
from vllm_steer.frontend.context import ensure_engine_context
from vllm_steer.params import FILE_KEY
from vllm_steer.peers.probe_hook import AsyncLLM as ProbingLLM
from vllm_steer.plugin.request_state import CapacityError
from vllm_steer.program import program_files
from vllm_steer.registry.module import parse_module
from vllm_steer.registry.module_files import write_module

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = {"prompt_token_ids": list(range(20, 40))}


async def generate(
    engine: Any,
    name: str,
    pause: float = 0.0,
    tokens: int = 24,
    pieces: list[Any] | None = None,
    **fields: Any,
) -> tuple[list[int], Any]:
    """Return the tokens of a stream by delta and the capture results of the last one.

    Append the number of tokens and the rows of each delta to ``pieces``.
    """
    params = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **fields,
    )
    found: list[int] = []
    results = None
    async for output in engine.generate(PROMPT, params, name):
        found += output.outputs[0].token_ids
        results = output.capture_results or results
        if pieces is not None:
            pieces.append((len(output.outputs[0].token_ids), output.outputs[0].capture_rows))
        if pause:
            await asyncio.sleep(pause)
            pause = 0.0
    return found, results


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    folder = tmp_path_factory.mktemp("async")
    (folder / "first.safetensors").write_bytes(write_module(parse_module({"base": {"post_block": {1: direction(1)}}})))
    made = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(tiny_llama),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=2048,
            **engine_kwargs({"max_rows": 4, "queue_timeout": 1}),
        ),
        capture_consumers={"filesystem": {"root": str(folder / "acts"), "layout": "packed"}},
        steering_modules={"first": folder / "first.safetensors"},
    )
    yield made
    made.shutdown()


@pytest.mark.failure(3)
@pytest.mark.feature("streaming, engine in a process of its own", "steer", "capture")
async def test_streams_are_steered_and_captured(engine: Any) -> None:
    """Catches an unsteered stream, results lost in merged deltas, and an error that does not reach the caller."""
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
    await rows_are_streamed(engine, steered[1])
    with pytest.raises(SteeringError, match="layer 99"):
        await generate(engine, "bad", steering_vectors={"post_block": {99: direction(1)}})
    assert len((await generate(engine, "after"))[0]) == 24
    await modules_are_applied(engine, site, plain[0], steered[0])


async def test_hidden_states_of_the_last_token(engine: Any) -> None:
    """Catches ``include_last`` of vllm-probe-hook's ``AsyncLLM`` with a row of another token, and lost rows."""
    probing = ProbingLLM(engine, layers=[2], include_last=True)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, detokenize=False)
    *_, output = [output async for output in probing.generate(PROMPT, params, "probed")]
    tokens = [*PROMPT["prompt_token_ids"], *output.outputs[0].token_ids]
    fields = {"hooks": {"post_block": [2]}, "positions": "all_prompt"}
    whole = SamplingParams(max_tokens=1, temperature=0, detokenize=False, capture={"memory": fields})
    *_, again = [each async for each in engine.generate({"prompt_token_ids": tokens}, whole, "whole")]
    rows = again.capture_results["memory"].tensor("post_block", 2)
    assert output.hidden_states[2].shape == (5, 64)
    torch.testing.assert_close(output.hidden_states[2], rows[-5:], atol=1e-3, rtol=1e-3)


async def test_consumers_and_modules_of_the_constructor(engine: Any) -> None:
    """Catches an ``AsyncLLM`` without the consumers and modules that its arguments name."""
    spec = {"hooks": {"post_block": [2]}, "positions": [3]}
    _, results = await generate(engine, "stored", capture={"filesystem": spec}, steering_modules=["first"])
    result = await asyncio.to_thread(results.__getitem__, "filesystem")
    assert result.status == "ok", result.error
    (stored,) = open_captures(Path(result.data["path"]).parent).find("stored")
    assert stored.positions("post_block", 2).tolist() == [3]
    with pytest.raises(SteeringError, match=r"AsyncLLM.from_engine_args"):
        await generate(engine, "bad", capture={"logging": spec})


@pytest.mark.parametrize("name", ["capture_consumers", "steering_registry", "steering_modules"])
async def test_arguments_need_steering(name: str, tmp_path: Path) -> None:
    """Catches an argument that is ignored because the engine is started without steering."""
    args = AsyncEngineArgs(model=str(tmp_path))
    with pytest.raises(SteeringError, match=rf"{name}: has no effect without steering; add .*engine_kwargs"):
        AsyncLLM.from_engine_args(args, **{name: {}})


async def test_wrong_arguments_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    """Catches an unknown consumer that is reported minutes later, or at the first request."""
    args = AsyncEngineArgs(model=str(tmp_path), **engine_kwargs())
    with pytest.raises(SteeringError, match="unknown consumer 'filesytem'"):
        AsyncLLM.from_engine_args(args, capture_consumers={"filesytem": {}})


async def test_admission_timeout_raises_in_the_caller(engine: Any) -> None:
    """Catches a caller left waiting, and an error without the reason. Four rows are in use for over a second."""
    long = [
        asyncio.ensure_future(
            generate(engine, f"long{i}", tokens=100_000, steering_vectors={"post_block": {1: direction(i)}})
        )
        for i in range(4)
    ]
    await asyncio.sleep(0.5)
    with pytest.raises(CapacityError, match="--steering-queue-timeout") as raised:
        await generate(engine, "late", steering_vectors={"post_block": {1: direction(9)}})
    assert raised.value.http_status == 503
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    assert len((await generate(engine, "after", steering_vectors={"post_block": {1: direction(9)}}))[0]) == 24


async def test_stop_string_is_not_a_refusal(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches output that ends with a client's stop string and is answered with HTTP 503."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    update = IncrementalDetokenizer.update
    monkeypatch.setattr(
        IncrementalDetokenizer,
        "update",
        lambda self, *args: update(self, *args) or ("steering: on" if len(self.output_token_ids) == 3 else None),
    )
    assert len((await generate(engine, "says it", steering_vectors={"post_block": {1: direction(1)}}))[0]) == 3


async def test_capture_of_a_disconnected_client_is_partial(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches incomplete rows in a consumer's dataset that count as complete."""
    desk = (await ensure_engine_context(engine)).capture_manager
    submit, delivered = desk.submit, []
    monkeypatch.setattr(desk, "submit", lambda *args, **more: delivered.append(submit(*args, **more)) or delivered[-1])
    pieces: list[Any] = []
    asked = {"capture": capture(positions="all_generated", stream=True)}
    leaving = asyncio.ensure_future(generate(engine, "leaves", tokens=100_000, pieces=pieces, **asked))
    while len(pieces) < 3:
        await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.gather(leaving, generate(engine, "stays", capture=capture()), return_exceptions=True)
    left, stayed = [await asyncio.to_thread(results.__getitem__, "memory") for results in delivered]
    assert (left.status, left.error) == ("partial", "the request was aborted")
    assert (stayed.status, stayed.error) == ("ok", None)
    assert len(left.positions("post_block", 2)) > 0


async def test_equal_programs_are_sent_once(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a program that is lost or exchanged in its file, and an engine that stops at a modified file."""
    monkeypatch.setattr(program_files, "MIN_PROGRAM_BYTES", 1)
    sites = [{"post_block": {1: direction(i, 30.0)}} for i in (21, 22)]
    files = (await ensure_engine_context(engine)).program_files
    assert files is not None
    answers = [
        [(await generate(engine, f"{i}-{again}", steering_vectors=site))[0] for again in range(3)]
        for i, site in enumerate(sites)
    ]
    assert len(files._files) == 2
    for first, *others in answers:
        assert others == [first, first]
    assert answers[0][0] != answers[1][0]
    await modified_file_ends_its_request(engine, monkeypatch)


async def modified_file_ends_its_request(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a program's file before the engine reads it."""
    site = {"post_block": {1: direction(23, 30.0)}}
    right = (await generate(engine, "new", steering_vectors=site))[0]
    monkeypatch.setattr(program_files, "_digest", lambda data: bytes(32))
    with pytest.raises(CapacityError, match="steer_file"):
        await generate(engine, "changed", steering_vectors=site)
    monkeypatch.setattr(program_files, "MIN_PROGRAM_BYTES", 1 << 20)
    assert (await generate(engine, "itself", steering_vectors=site))[0] == right


async def test_rejects_program_files_of_clients(engine: Any) -> None:
    """Catches a client that makes the engine read any file."""
    with pytest.raises(SteeringError, match="reserved for internal use"):
        await generate(engine, "own", extra_args={FILE_KEY: b"x"})


async def session(engine: Any, name: str, whole: dict[str, Any], piece: dict[str, Any]) -> list[int]:
    """Return the tokens of a session of two pieces, the second with parameters of its own."""

    def asked(**fields: Any) -> SamplingParams:
        delta = RequestOutputKind.DELTA
        return SamplingParams(
            max_tokens=4, temperature=0, ignore_eos=True, detokenize=False, output_kind=delta, **fields
        )

    async def pieces() -> AsyncIterator[StreamingInput]:
        # vLLM adds what follows to this list.
        yield StreamingInput({"prompt_token_ids": list(range(20, 40))})
        yield StreamingInput({"prompt_token_ids": [3, 4]}, asked(**piece))

    outputs = engine.generate(pieces(), asked(**whole), name)
    return [token async for output in outputs for token in output.outputs[0].token_ids]


async def test_rejects_steered_sessions_and_pieces(engine: Any) -> None:
    """Catches steered streaming input.

    vLLM gives the request check only the signal of a session's end. Its pieces extend the prompt, so that the program's
    prompt length and the block keys would be wrong.
    """
    plain = await session(engine, "plain", {}, {})
    assert len(plain) == 8
    for number, fields in enumerate(
        (
            {"steering_vectors": {"post_block": {1: direction(1)}}},
            {"capture": capture()},
            {"steering_modules": ["none"]},
            {"extra_args": {FILE_KEY: b"x"}},
        )
    ):
        for whole, piece in ((fields, {}), ({}, fields)):
            with pytest.raises(SteeringError):
                await session(engine, f"session-{number}", whole, piece)
    await engine.steering.set(base={"post_block": {1: direction(1)}})
    with pytest.raises(SteeringError, match="streaming input"):
        await session(engine, "under global steering", {}, {})
    await engine.steering.clear()
    assert await session(engine, "plain again", {}, {}) == plain


async def rows_are_streamed(engine: Any, right: Any) -> None:
    """Check that each row arrives once and in time, in separate and in merged deltas."""
    site = {"post_block": {1: direction(1)}}
    fast: list[Any] = []
    merged: list[Any] = []
    asked = {"steering_vectors": site, "capture": capture(stream=True)}
    plain: list[Any] = []
    await asyncio.gather(
        generate(engine, "fast", pieces=fast, **asked),
        generate(engine, "merged", pause=2.0, pieces=merged, **asked),
        generate(engine, "whole", pieces=plain, steering_vectors=site, capture=capture()),
    )
    whole = await asyncio.to_thread(right.__getitem__, "memory")
    assert len(merged) < len(fast)
    assert all(piece is None for _, piece in plain)
    prompt = len(PROMPT["prompt_token_ids"])
    for pieces in (fast, merged):
        # A loaded machine can merge tokens of the fast stream too. The first token has the prompt's rows.
        expected = [count + (prompt - 1) * (i == 0) for i, (count, _) in enumerate(pieces)]
        for where in whole.sites:
            rows = [piece["memory"][where] for _, piece in pieces]
            assert np.concatenate([each.positions for each in rows]).tolist() == list(range(43))
            assert [len(each.positions) for each in rows] == expected
            torch.testing.assert_close(
                torch.cat([each.rows for each in rows]), whole.tensor(*where), atol=2e-3, rtol=1e-4
            )


async def modules_are_applied(engine: Any, site: Any, plain: list[int], steered: list[int]) -> None:
    """Check that modules steer a request and that errors reach the caller."""
    info = await engine.steering.register("m", base=site)
    assert (await generate(engine, "named", steering_modules=["m"]))[0] == steered
    assert (await engine.steering.set(modules=["m"])).modules[0].digest == info.digest
    assert (await generate(engine, "global"))[0] == steered
    assert (await engine.steering.status()).digest != (await engine.steering.clear()).digest
    assert (await engine.steering.delete("m")).deleted == [info.digest]
    assert (await generate(engine, "cleared"))[0] == plain
    with pytest.raises(SteeringError, match="unknown module 'm'"):
        await generate(engine, "gone", steering_modules=["m"])

# SPDX-License-Identifier: Apache-2.0
"""User hooks, against forward hooks in HF Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import AsyncEngineArgs, envs

from tests.conformance.engine import MODES
from tests.engine.answers import finish, logprobs_of, params, prompt, run, tokens_of
from tests.engine.conftest import opened
from tests.engine.hf import load
from tests.engine.test_replace import TOLERANCE, expected
from tests.tiny import direction, make_llm
from vllm_steer import Edit, HookedRows, IncompatibleError, SteeringError, engine_kwargs
from vllm_steer.engine.scheduler import SteeringSchedulerMixin
from vllm_steer.frontend import user_hooks
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES

HOOKS = {"user_hooks": True, "points": list(OPTIONAL_POINTS)}
SIZES: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 32, "block_size": 32}
LENGTHS = (3, 90, 40, 71)
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(3, 120, n)] for n in LENGTHS]
PUSH = torch.from_numpy(direction(5, 2.0))


@pytest.fixture(scope="module", params=["eager", "traced"])
def llm(request: Any, tiny_llama: Path) -> Iterator[Any]:
    """Return an engine with hooks; the model of the second one is traced as for compilation."""
    mode: dict[str, Any] = {} if request.param == "eager" else {"enforce_eager": False, **MODES["traced"]}
    with opened(tiny_llama, steering_config=HOOKS, enable_prefix_caching=True, **SIZES, **mode) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return load(tiny_llama)


def bend(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return rows that depend on their position and value, and not on other rows."""
    changed = torch.where(positions[:, None] % 3 == 1, rows * 0.5 + PUSH, rows)
    changed[positions == 2] = torch.tanh(rows[positions == 2])
    return changed


def in_transformers(point: str, layer: int) -> tuple[str, int, Any]:
    return point, layer, lambda stream: bend(stream, torch.arange(len(stream)))


def run_all(llm: Any) -> list[Any]:
    return run(llm, [prompt(*tokens) for tokens in PROMPTS], [params(4)] * len(PROMPTS))


@pytest.mark.parametrize("point", POINT_NAMES)
def test_hooks_act_as_in_transformers(llm: Any, model: Any, point: str) -> None:
    """Catches rows of another request or position, a hook at another site, and a change of the wrong summand.

    Prompts are prefilled in chunks, together with others that decode. One hook returns rows, one changes them in place.
    """

    def returns(view: HookedRows) -> torch.Tensor:
        return bend(view.rows, view.positions)

    def changes(view: HookedRows) -> None:
        view.rows[:] = bend(view.rows, view.positions)

    with llm.register_hook(returns, point, 1), llm.register_hook(changes, point, [2]):
        outputs = run_all(llm)
    for output in outputs:
        right = expected(model, output, [in_transformers(point, 1), in_transformers(point, 2)])
        np.testing.assert_allclose(logprobs_of(output), right, atol=20 * TOLERANCE)
        assert np.abs(expected(model, output, []) - right).max() > 1e-2
    for output in run_all(llm):
        np.testing.assert_allclose(logprobs_of(output), expected(model, output, []), atol=20 * TOLERANCE)


def test_a_hook_sees_its_request_only(llm: Any, model: Any) -> None:
    """Catches a hook that acts on neighbours, wrong ids, and rows read after or without the edits of other requests."""
    seen: dict[str, list[int]] = {}

    def push_first(view: HookedRows) -> None:
        seen.setdefault(view.request_id, []).extend(view.positions.tolist())
        if view.request_id == chosen:
            view.rows += PUSH

    edit = Edit(kind="add", point="post_block", layers=1, vector=PUSH.numpy())
    spec = {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}
    chosen = str(int(run(llm, [prompt(5)], [params(1)])[0].request_id) + 1)
    wanted = [params(4, capture=spec), params(4, steering=[edit]), params(4), params(4)]
    with llm.register_hook(push_first, "blocks.1.hook_resid_post"):
        outputs = run(llm, [prompt(*tokens) for tokens in (PROMPTS[1], PROMPTS[1], *PROMPTS[2:])], wanted)
    assert outputs[0].request_id == chosen
    for output in outputs:
        assert sorted(seen[output.request_id]) == list(range(len(output.prompt_token_ids) + 3))
    np.testing.assert_allclose(logprobs_of(outputs[0]), logprobs_of(outputs[1]), atol=20 * TOLERANCE)
    right = expected(model, outputs[0], [("post_block", 1, lambda stream: stream + PUSH)])
    np.testing.assert_allclose(logprobs_of(outputs[0]), right, atol=20 * TOLERANCE)
    for output in outputs[2:]:
        np.testing.assert_allclose(logprobs_of(output), expected(model, output, []), atol=20 * TOLERANCE)
    rows = outputs[0].capture_results["memory"].tensor("post_block", 1)
    states: list[torch.Tensor] = []
    handle = model.model.layers[1].register_forward_hook(lambda module, args, out: states.append(out))
    expected(model, outputs[0], [])
    handle.remove()
    stream = states[0][0] if isinstance(states[0], tuple) else states[0]
    torch.testing.assert_close(rows, stream.reshape(-1, 64) + PUSH, atol=1e-3, rtol=1e-3)


def assert_cache_is_separate(llm: Any, model: Any) -> None:
    run_all(llm)
    counts: list[int] = []

    def push(view: HookedRows) -> None:
        counts.append(len(view.rows))
        view.rows += PUSH

    changed = [("post_block", 0, lambda stream: stream + PUSH)]
    with llm.register_hook(push, "post_block", 0):
        for _ in range(2):
            counts.clear()
            for output in run_all(llm):
                np.testing.assert_allclose(logprobs_of(output), expected(model, output, changed), atol=20 * TOLERANCE)
            assert sum(counts) == sum(LENGTHS) + 3 * len(LENGTHS)
    for output in run_all(llm):
        np.testing.assert_allclose(logprobs_of(output), expected(model, output, []), atol=20 * TOLERANCE)


def test_a_reused_id_shares_no_blocks(llm: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches blocks of an ended request, under another hook, in a request with its id, if vLLM keeps given ids."""
    monkeypatch.setitem(vars(envs), "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", True)
    engine, tokens = llm.llm_engine, PROMPTS[1]
    for scale in (1.0, -2.0):

        def push(view: HookedRows, added: torch.Tensor = scale * PUSH) -> None:
            view.rows += added

        with llm.register_hook(push, "post_block", 1):
            engine.add_request("again", prompt(*tokens), params(2))
            outputs: list[Any] = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
        output = outputs[-1]
        right = expected(model, output, [("post_block", 1, lambda stream, added=scale * PUSH: stream + added)])
        np.testing.assert_allclose(logprobs_of(output), right, atol=20 * TOLERANCE)
        assert not output.num_cached_tokens


def test_cached_blocks_are_not_shared(llm: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches blocks cached without the hook, or with it, that serve others. Negative control: keys without hooks."""
    assert_cache_is_separate(llm, model)
    monkeypatch.setattr(user_hooks, "context_of", lambda processor: None)
    with pytest.raises(AssertionError):
        assert_cache_is_separate(llm, model)
    assert llm.reset_prefix_cache()


def test_a_hook_that_raises_ends_its_request(llm: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that dies, and a request that goes on without its hook. Negative control: dropped errors."""

    def fails(view: HookedRows) -> torch.Tensor | None:
        if view.positions[-1] == 91:
            raise ZeroDivisionError("no luck")
        return view.rows[:, :1] if len(view.rows) == 3 else None

    def check() -> None:
        with llm.register_hook(fails, "post_attn", [0, 3]):
            outputs = run_all(llm)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error", "length", "length"]
        assert "must stay floating-point numbers of shape [3, 64]" in outputs[0].outputs[0].stop_reason
        assert "fails at post_attn of layer 0 raised ZeroDivisionError: no luck" in outputs[1].outputs[0].stop_reason
        assert [len(tokens_of(output)) for output in outputs] == [0, 2, 4, 4]
        for output in outputs[2:]:
            np.testing.assert_allclose(logprobs_of(output), expected(model, output, []), atol=20 * TOLERANCE)

    check()
    assert {output.outputs[0].finish_reason for output in run_all(llm)} == {"length"}
    monkeypatch.setattr(SteeringSchedulerMixin, "_drop_failed", lambda self, failed, output: None)
    with pytest.raises(AssertionError):
        check()


def test_a_hook_that_raises_beside_prompt_logprobs(llm: Any) -> None:
    """Catches the end of the engine: vLLM does not accept log-probabilities of a prompt without a sampled token."""

    def fails(view: HookedRows) -> None:
        if len(view.rows) == 3:
            raise ZeroDivisionError("no luck")

    wanted = params(4, prompt_logprobs=2)
    with llm.register_hook(fails, "post_attn", 1):
        outputs = run(llm, [prompt(*tokens) for tokens in PROMPTS[:2]], [wanted] * 2)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "ZeroDivisionError" in outputs[0].outputs[0].stop_reason
    assert [len(output.prompt_logprobs) for output in outputs] == [1, LENGTHS[1]]


def test_refusals(llm: Any) -> None:
    """Catches hooks that would never run."""

    def nothing(view: HookedRows) -> None:
        return None

    for arguments, field in (
        ((nothing, "nowhere", 1), "point"),
        ((nothing, "post_block", 4), "layers"),
        ((nothing, "post_block"), "layers"),
        (("text", "post_block", 1), "fn"),
    ):
        with pytest.raises(SteeringError) as caught:
            llm.register_hook(*arguments)
        assert caught.value.field == field
    llm.llm_engine.add_request("running", prompt(1, 2), params(2))
    with pytest.raises(SteeringError, match="requests are running"):
        llm.register_hook(nothing, "post_block", 1)
    finish(llm.llm_engine)
    handle = llm.register_hook(nothing, "post_block", "all")
    handle.remove()
    handle.remove()


def test_engines_that_cannot_run_hooks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches hooks in servers, in other processes, and in engines where the setting has no effect."""
    with opened(tiny_llama) as off, pytest.raises(SteeringError, match=r'user_hooks.*"user_hooks": True'):
        off.register_hook(lambda view: None, "post_block", 1)
    with pytest.raises(IncompatibleError, match="never in a server"):
        AsyncEngineArgs(model=str(tiny_llama), **engine_kwargs({"user_hooks": True})).create_engine_config()
    with pytest.raises(IncompatibleError, match="several workers"):
        make_llm(tiny_llama, steering_config={"user_hooks": True}, tensor_parallel_size=2)
    with pytest.raises(SteeringError, match="must be true or false"):
        engine_kwargs({"user_hooks": 1})
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(SteeringError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        make_llm(tiny_llama, steering_config={"user_hooks": True})

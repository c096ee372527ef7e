# SPDX-License-Identifier: Apache-2.0
"""Steps with nothing to do run what stock vLLM would compile; all others run the model with its taps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.conformance.model import save
from tests.conformance.zoo import BY_NAME
from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import close
from tests.engine.noting import CODES
from tests.tiny import direction, make_llm
from vllm_steer import Edit
from vllm_steer.config import SteeringConfig
from vllm_steer.engine import plain_code as plain_code_module
from vllm_steer.engine import self_check
from vllm_steer.engine.plain_code import NoPlainCode, PlainCode, _check, _shell, own_forwards
from vllm_steer.errors import SteeringError

NOTED = {"compilation_config": {"mode": "DYNAMO_TRACE_ONCE", "backend": "tests.engine.noting.noting"}}
PLAIN = {**NOTED, "enforce_eager": False, "steering_config": {"plain_code": True}}


@pytest.fixture(scope="module", autouse=True)
def in_time() -> Iterator[None]:
    """Compiled when first called: vLLM's way ahead of time keeps what Inductor makes, which this backend does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_AOT_COMPILE", "0")
        yield


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that adds up its stream ahead of the norm, where the compiler makes one kernel of both."""
    return save(BY_NAME["granite"], tmp_path_factory.mktemp("granite"))


def root_of(llm: Any) -> Any:
    """The module that the model calls now."""
    return runner_of(llm).get_model().model


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@pytest.fixture(scope="module")
def stock_code(granite: Path) -> str:
    """What stock vLLM compiles."""
    CODES.clear()
    llm = make_llm(granite, max_model_len=64, **{**NOTED, "enforce_eager": False, "enable_steering": False})
    close(llm)
    (code,) = CODES
    return code


def workload() -> tuple[list[Any], list[Any]]:
    """A plain request, a steered one, and one that is read."""
    prompts = [prompt(*range(7 + i, 30 + i)) for i in range(3)]
    edits = {"pre_attn": {2: direction(3)}, "post_attn": {1: direction(4)}}
    return prompts, [params(6), params(6, steering_vectors=edits), params(6, capture=capture())]


@pytest.fixture(scope="module")
def right(granite: Path) -> list[Any]:
    """What an engine with one code gives."""
    llm = make_llm(granite, max_model_len=64)
    answers: list[Any] = run(llm, *workload())
    close(llm)
    return answers


@pytest.fixture(scope="module")
def engine(granite: Path, stock_code: str, right: list[Any]) -> Iterator[Any]:
    CODES.clear()
    llm = make_llm(granite, max_model_len=64, **PLAIN)
    yield llm
    close(llm)


def test_idle_steps_run_the_code_of_stock_vllm(engine: Any, stock_code: str) -> None:
    """Catches a tap, or a wrapper of ours, in what idle steps run; and no tap in what the others do."""
    tapped, plain = CODES
    assert plain == stock_code
    assert tapped.count("vllm_steer.tap") == 12
    assert "vllm_steer" not in plain


def ran(llm: Any, patch: pytest.MonkeyPatch, wanted: list[Any]) -> list[str]:
    """Which of the two each forward pass of the requests ran."""
    seen: list[str] = []
    graph_sets = runner_of(llm).steering.graph_sets
    real = graph_sets._plain.switch

    def switch(tapped: bool) -> None:
        real(tapped)
        seen.append("tapped" if root_of(llm) is graph_sets._plain._tapped else "plain")

    with patch.context() as context:
        context.setattr(graph_sets._plain, "switch", switch)
        run(llm, [prompt(*range(5 + i, 25 + i)) for i in range(len(wanted))], wanted)
    # Each step ends with the model's own module.
    assert set(seen[1::2]) == {"tapped"}
    return seen[::2]


def test_each_step_runs_what_it_needs(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches edits or reads in a step that runs the model without taps, and idle steps that run the one with them."""
    first = {"post_block": {1: direction(1)}}
    assert set(ran(engine, monkeypatch, [params(3)])) == {"plain"}
    assert set(ran(engine, monkeypatch, [params(3, steering_vectors=first), params(3)])) == {"tapped"}
    assert set(ran(engine, monkeypatch, [params(3, capture=capture())])) == {"tapped"}
    edit = Edit(kind="add", point="post_block", layers=[1], vector=direction(1), tokens="prompt")
    prompt_only = params(3, steering=[edit])
    assert ran(engine, monkeypatch, [prompt_only]) == ["tapped", "plain", "plain"]
    assert any(hasattr(module, "steering_taps") for module in root_of(engine).modules())


def answers_right(llm: Any, right: list[Any]) -> None:
    """Together, when all steps run the one code, and one after another, when a plain request has the other."""
    alone = [run(llm, [a], [b])[0] for a, b in zip(*workload(), strict=True)]
    for got in (run(llm, *workload()), alone):
        for mine, theirs in zip(got, right, strict=True):
            assert tokens_of(mine) == tokens_of(theirs)
            np.testing.assert_allclose(logprobs_of(mine), logprobs_of(theirs), atol=1e-4)
        close_to(result(got[2]), result(right[2]))


@pytest.mark.feature("plain code for idle steps", "steer", "capture")
def test_both_codes_compute_the_same(engine: Any, right: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Failure: a shell that has other weights or caches than the model. Its control never changes back to the taps."""
    answers_right(engine, right)
    plain = runner_of(engine).steering.graph_sets._plain
    with monkeypatch.context() as patch:
        patch.setattr(plain, "switch", lambda tapped: PlainCode.switch(plain, False))
        with pytest.raises((AssertionError, AttributeError)):
            answers_right(engine, right)
    plain.switch(True)
    answers_right(engine, right)


def test_weights_that_change_change_in_both(engine: Any) -> None:
    """Catches a shell that keeps the weights that were there when it was made."""
    p, plain = [prompt(*range(5, 25))], [params(2)]
    before = logprobs_of(run(engine, p, plain)[0])
    norm = root_of(engine).layers[1].post_attention_layernorm
    kept = norm.weight
    norm.weight = nn.Parameter(2 * kept.data, requires_grad=False)
    try:
        changed = logprobs_of(run(engine, p, plain)[0])
    finally:
        norm.weight = kept
    assert np.abs(changed - before).max() > 1e-2
    np.testing.assert_array_equal(logprobs_of(run(engine, p, plain)[0]), before)


def test_a_plain_code_that_computes_something_else_is_refused(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches plain requests that a faulty plain code answers: here its last layer adds twice as much to the stream.

    Its control leaves the comparison out: the engine starts.
    """
    real = plain_code_module._shell

    def shell(module: nn.Module, changed: dict[int, nn.Module]) -> nn.Module:
        made = real(module, changed)
        if hasattr(made, "residual_multiplier"):
            made.residual_multiplier = 2 * module.residual_multiplier
        return made

    monkeypatch.setattr(plain_code_module, "_shell", shell)
    with pytest.raises(SteeringError, match="plain_code: the model without taps computes other hidden states"):
        make_llm(granite, max_model_len=64, **PLAIN)
    monkeypatch.setattr(self_check, "check_codes", lambda *rows: None)
    close(make_llm(granite, max_model_len=64, **PLAIN))


def test_an_engine_that_compiles_nothing_says_so(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error, and silence, where there is no second code to be had."""
    said: list[str] = []
    monkeypatch.setattr(plain_code_module.logger, "warning", lambda text, *values: said.append(text % values))
    llm = make_llm(tiny_llama, steering_config={"plain_code": True})
    assert runner_of(llm).steering.graph_sets._plain is None
    close(llm)
    (message,) = said
    assert "nothing is compiled" in message


def test_a_module_under_another_name_is_not_left_behind() -> None:
    """Catches a shell that still reaches the tapped layer, by a list that is no part of the module tree."""
    root = nn.Module()
    root.layer = nn.Linear(2, 2)
    changed = {id(root): root, id(root.layer): root.layer}
    ways = {
        "fast": [root.layer], "by_name": {"layer": root.layer}, "pair": (1, root.layer), "call": root.layer.forward,
    }  # fmt: skip
    for name, value in ways.items():
        other = nn.Module()
        other.__dict__.update(root.__dict__)
        other.__dict__[name] = value
        with pytest.raises(NoPlainCode, match=name):
            _check({**changed, id(other): other}, (), ())
    root.layer.__dict__["call"] = root.layer.extra_repr
    _check(changed, (), ())


def test_what_a_shell_would_lack_is_seen() -> None:
    """Catches a shell without the cache, or the forward, that its module has from others than us."""
    layer = nn.Linear(2, 2)
    changed: dict[int, nn.Module] = {id(layer): layer}
    _check(changed, (), own_forwards(layer))
    with pytest.raises(NoPlainCode, match="keeps a cache"):
        _check(changed, {id(layer)}, ())
    vars(layer)["forward"] = lambda x: x
    with pytest.raises(NoPlainCode, match="forward of its own"):
        _check(changed, (), own_forwards(layer))


def test_a_plain_code_for_one_size_alone_is_refused() -> None:
    """Catches an engine whose plain requests are wrong, since a size became a constant when it was compiled."""
    tapped, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    places: dict[str, Any] = {"model": tapped}
    constant: list[int] = [64]

    def run(tokens: int) -> torch.Tensor:
        codes.switch(tapped=False)
        model = places["model"]
        return torch.as_tensor(model(torch.ones(*(constant if model is plain and constant else [tokens]), 4)))

    codes = PlainCode([(places, "model")], tapped, plain)
    with pytest.raises(SteeringError, match="64 tokens alone"):
        codes.compile(run, 64)
    constant.clear()
    codes.compile(run, 64)
    # Another stage than the last has no hidden states.
    codes.compile(lambda tokens: None, 64)


def test_vllm_finds_the_sizes_that_change_behind_a_decorator() -> None:
    """Catches inputs of one size for ever: vLLM marks them by the signature of what a decorator has wrapped."""

    class Model:
        @capture_outputs
        def forward(self, input_ids: int, scale: int = 2) -> int:
            return input_ids * scale

    renamed = plain_code_module._renamed(Model)
    assert inspect.signature(renamed.forward) == inspect.signature(Model.forward)
    assert list(inspect.signature(renamed.forward).parameters) == ["self", "input_ids", "scale"]
    assert renamed().forward(3) == 6 and renamed().forward(3, scale=3) == 9
    assert renamed.forward.__code__ is not Model.forward.__code__
    assert renamed.forward.__qualname__ != Model.forward.__qualname__


def capture_outputs(forward: Any) -> Any:
    """A decorator as those of Transformers' models."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapped


def test_a_shell_shares_all_but_what_was_installed() -> None:
    """Catches parameters that are held twice, and a forward of ours in a shell."""
    layer: Any = nn.Linear(2, 2)
    layer.call = layer.forward
    layer.forward = lambda x: x
    layer.register_module("steering_taps", nn.ModuleList())
    other = nn.Linear(2, 2)
    root = nn.Sequential(layer, other)
    shell: Any = _shell(root, {id(root): root, id(layer): layer})
    assert shell is not root and shell[0] is not layer and shell[1] is other
    assert shell[0]._parameters is layer._parameters
    assert [*shell[0]._modules] == [] and "steering_taps" in layer._modules
    assert not torch.equal(shell[0](torch.ones(2)), torch.ones(2))
    # A method of its own, kept as an attribute, is the shell's.
    assert shell[0].call.__self__ is shell[0] and layer.call.__self__ is layer


def test_one_set_of_graphs_has_no_plain_code() -> None:
    """Catches idle graphs, the only ones, that were captured without taps."""
    with pytest.raises(SteeringError, match="graph_sets"):
        SteeringConfig.parse({"plain_code": True, "graph_sets": 1})
    assert SteeringConfig.parse({"plain_code": True}).plain_code

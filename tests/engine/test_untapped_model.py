# SPDX-License-Identifier: Apache-2.0
"""The untapped model: idle steps run it, and it computes what stock vLLM computes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm import envs
from vllm.config import CompilationMode

from tests.conformance.model import save
from tests.conformance.zoo import BY_NAME
from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import close, opened
from tests.engine.noting import CODES
from tests.tiny import direction, make_llm
from vllm_steer import Edit
from vllm_steer.config import SteeringConfig
from vllm_steer.engine import model_setup, self_check, untapped_model
from vllm_steer.engine.untapped_model import (
    UntappedModel,
    UntappedModelUnavailableError,
    _check,
    _class_with_own_cache_key,
    _shell,
    modules_with_own_forward,
    plain_code_problem,
)
from vllm_steer.errors import SteeringError

NOTED = {"compilation_config": {"mode": "DYNAMO_TRACE_ONCE", "backend": "tests.engine.noting.noting"}}
UNTAPPED = {**NOTED, "enforce_eager": False, "steering_config": {"plain_code": True}}


@pytest.fixture(scope="module", autouse=True)
def no_ahead_of_time_compilation() -> Iterator[None]:
    """Compile on the first call: ahead-of-time compilation needs Inductor's output, which this backend lacks."""
    # Other files may have left code that was compiled without guards, and cached variables, in this process.
    torch._dynamo.reset()
    envs.disable_envs_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_AOT_COMPILE", "0")
        yield


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that adds to its stream right before a norm, which the compiler fuses into one kernel."""
    return save(BY_NAME["granite"], tmp_path_factory.mktemp("granite"))


def root_of(llm: Any) -> Any:
    """Return the decoder module that the model currently calls."""
    return runner_of(llm).get_model().model


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@pytest.fixture(scope="module")
def stock_code(granite: Path) -> str:
    """Return the code that stock vLLM compiles for this model."""
    CODES.clear()
    llm = make_llm(granite, max_model_len=64, **{**NOTED, "enforce_eager": False, "enable_steering": False})
    close(llm)
    (code,) = CODES
    return code


def workload() -> tuple[list[Any], list[Any]]:
    """Return prompts and parameters of a plain, a steered and a captured request."""
    prompts = [prompt(*range(7 + i, 30 + i)) for i in range(3)]
    edits = {"pre_attn": {2: direction(3)}, "post_attn": {1: direction(4)}}
    return prompts, [params(6), params(6, steering_vectors=edits), params(6, capture=capture())]


@pytest.fixture(scope="module")
def expected(granite: Path) -> list[Any]:
    """Return the outputs of an engine without an untapped model."""
    with opened(granite, max_model_len=64) as llm:
        answers: list[Any] = run(llm, *workload())
    return answers


@pytest.fixture(scope="module")
def engine(granite: Path, stock_code: str, expected: list[Any]) -> Iterator[Any]:
    CODES.clear()
    with opened(granite, max_model_len=64, **UNTAPPED) as llm:
        yield llm


def test_untapped_code_equals_stock_vllm(engine: Any, stock_code: str) -> None:
    """Catches a tap or a wrapper of ours in the untapped code, and missing taps in the other code."""
    tapped, untapped = CODES
    assert untapped == stock_code
    assert tapped.count("vllm_steer.tap") == 12
    assert "vllm_steer" not in untapped


def models_run(llm: Any, patch: pytest.MonkeyPatch, wanted: list[Any]) -> list[str]:
    """Return which of the two models each forward pass of the requests ran."""
    seen: list[str] = []
    untapped = runner_of(llm).steering.graph_sets._untapped
    real = untapped.switch

    def switch(*, tapped: bool) -> None:
        real(tapped=tapped)
        seen.append("tapped" if root_of(llm) is untapped._tapped else "untapped")

    with patch.context() as context:
        context.setattr(untapped, "switch", switch)
        run(llm, [prompt(*range(5 + i, 25 + i)) for i in range(len(wanted))], wanted)
    # Each step restores the model's own module.
    assert set(seen[1::2]) == {"tapped"}
    return seen[::2]


def test_only_idle_steps_run_the_untapped_model(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches (1) edits or captures in a step without taps and (2) idle steps with taps."""
    first = {"post_block": {1: direction(1)}}
    assert set(models_run(engine, monkeypatch, [params(3)])) == {"untapped"}
    assert set(models_run(engine, monkeypatch, [params(3, steering_vectors=first), params(3)])) == {"tapped"}
    assert set(models_run(engine, monkeypatch, [params(3, capture=capture())])) == {"tapped"}
    edit = Edit(kind="add", point="post_block", layers=[1], vector=direction(1), tokens="prompt")
    prompt_only = params(3, steering=[edit])
    assert models_run(engine, monkeypatch, [prompt_only]) == ["tapped", "untapped", "untapped"]
    assert any(hasattr(module, "steering_taps") for module in root_of(engine).modules())


def assert_outputs(llm: Any, expected: list[Any]) -> None:
    """Check the outputs of the workload as one batch, which runs one model, and one by one, which runs both."""
    alone = [run(llm, [a], [b])[0] for a, b in zip(*workload(), strict=True)]
    for outputs in (run(llm, *workload()), alone):
        for output, right in zip(outputs, expected, strict=True):
            assert tokens_of(output) == tokens_of(right)
            np.testing.assert_allclose(logprobs_of(output), logprobs_of(right), atol=1e-4)
        close_to(result(outputs[2]), result(expected[2]))


@pytest.mark.feature("plain code for steps without edits and captures", "steer", "capture")
def test_both_models_compute_the_same(engine: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a copy with other weights or caches. Negative control: an engine that never runs the taps."""
    assert_outputs(engine, expected)
    untapped = runner_of(engine).steering.graph_sets._untapped
    with monkeypatch.context() as patch:
        patch.setattr(untapped, "switch", lambda *, tapped: UntappedModel.switch(untapped, tapped=False))
        with pytest.raises((AssertionError, AttributeError)):
            assert_outputs(engine, expected)
    untapped.switch(tapped=True)
    assert_outputs(engine, expected)


def test_replaced_weights_apply_to_both_models(engine: Any) -> None:
    """Catches a copy that keeps the weights from its creation."""
    prompts, plain = [prompt(*range(5, 25))], [params(2)]
    before = logprobs_of(run(engine, prompts, plain)[0])
    norm = root_of(engine).layers[1].post_attention_layernorm
    weight = norm.weight
    norm.weight = nn.Parameter(2 * weight.data, requires_grad=False)
    try:
        changed = logprobs_of(run(engine, prompts, plain)[0])
    finally:
        norm.weight = weight
    assert np.abs(changed - before).max() > 1e-2
    np.testing.assert_array_equal(logprobs_of(run(engine, prompts, plain)[0]), before)


def test_self_check_refuses_a_different_untapped_model(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a faulty copy that would answer plain requests: its last layer adds twice as much to the stream.

    Negative control: without the comparison, the engine starts.
    """
    real = untapped_model._shell

    def shell(module: nn.Module, affected: dict[int, nn.Module]) -> nn.Module:
        made = real(module, affected)
        if hasattr(made, "residual_multiplier"):
            made.residual_multiplier = 2 * module.residual_multiplier
        return made

    monkeypatch.setattr(untapped_model, "_shell", shell)
    with pytest.raises(SteeringError, match="plain_code: the model without taps computes other hidden states"):
        make_llm(granite, max_model_len=64, **UNTAPPED)
    monkeypatch.setattr(self_check, "check_plain_code", lambda *rows: None)
    close(make_llm(granite, max_model_len=64, **UNTAPPED))


def test_warns_if_nothing_is_compiled(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error, or silence, if ``plain_code`` is set for an eager engine."""
    warnings: list[str] = []
    monkeypatch.setattr(model_setup.logger, "warning", lambda text, *values: warnings.append(text % values))
    with opened(tiny_llama, steering_config={"plain_code": True}) as llm:
        assert runner_of(llm).steering.graph_sets._untapped is None
        (facts,) = llm.collective_rpc("steering_capabilities")
    (message,) = warnings
    assert "does not compile" in message
    assert facts["no_plain_code"] == "vLLM does not compile the model"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"plain_code": False}, "--no-steering-plain-code"),
        ({"graph_sets": 1}, "graph_sets is 1"),
        ({"mode": CompilationMode.NONE}, "does not compile"),
        ({"separate": False}, "one set of CUDA graphs"),
        ({"device": "cpu"}, "outside of a GPU"),
        ({"device": "cpu", "plain_code": True}, None),
        ({"separate": False, "plain_code": True}, "one set of CUDA graphs"),
    ],
)
def test_default_on_a_gpu(changed: dict[str, Any], problem: str | None) -> None:
    """Catches (1) a GPU engine without plain code, (2) one with it against its settings, and (3) a missing reason."""
    given = {"plain_code": None, "graph_sets": 8, "mode": CompilationMode.VLLM_COMPILE, "separate": True,
             "device": "cuda", **changed}  # fmt: skip
    vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(mode=given["mode"]))
    config = SteeringConfig(plain_code=given["plain_code"], graph_sets=given["graph_sets"])
    found = plain_code_problem(
        config, vllm_config, torch.device(given["device"]), separate_idle_graphs=given["separate"]
    )
    assert found is None if problem is None else problem in (found or "")


@pytest.mark.parametrize(("plain_code", "problem"), [(None, True), (True, False)])
def test_batch_invariance_excludes_the_default(
    plain_code: bool | None, problem: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches outputs of plain requests that depend on steered neighbours where the user excluded this."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(mode=CompilationMode.VLLM_COMPILE))
    config = SteeringConfig(plain_code=plain_code)
    found = plain_code_problem(config, vllm_config, torch.device("cuda"), separate_idle_graphs=True)
    assert ("VLLM_BATCH_INVARIANT" in (found or "")) is problem


def test_refuses_references_outside_of_the_module_tree() -> None:
    """Catches a copy that reaches a tapped layer through a list, dict, tuple or bound method."""
    root = nn.Module()
    root.layer = nn.Linear(2, 2)
    affected = {id(root): root, id(root.layer): root.layer}
    references = {
        "fast": [root.layer], "by_name": {"layer": root.layer}, "pair": (1, root.layer), "call": root.layer.forward,
    }  # fmt: skip
    for name, value in references.items():
        other = nn.Module()
        other.__dict__.update(root.__dict__)
        other.__dict__[name] = value
        with pytest.raises(UntappedModelUnavailableError, match=name):
            _check({**affected, id(other): other}, (), ())
    root.layer.__dict__["call"] = root.layer.extra_repr
    _check(affected, (), ())


def test_refuses_modules_with_a_cache_or_a_forward_of_their_own() -> None:
    """Catches a copy that lacks the KV cache or the forward that vLLM gives the module."""
    layer = nn.Linear(2, 2)
    affected: dict[int, nn.Module] = {id(layer): layer}
    _check(affected, (), modules_with_own_forward(layer))
    with pytest.raises(UntappedModelUnavailableError, match="a KV cache"):
        _check(affected, {id(layer)}, ())
    vars(layer)["forward"] = lambda x: x
    with pytest.raises(UntappedModelUnavailableError, match="forward of its own"):
        _check(affected, (), modules_with_own_forward(layer))


def test_refuses_code_for_a_single_batch_size() -> None:
    """Catches wrong outputs of plain requests if the compiler made the batch size a constant."""
    tapped, untapped = nn.Linear(4, 4), nn.Linear(4, 4)
    places: dict[str, Any] = {"model": tapped}
    constant: list[int] = [64]

    def run(tokens: int) -> torch.Tensor:
        both.switch(tapped=False)
        model = places["model"]
        return torch.as_tensor(model(torch.ones(*(constant if model is untapped and constant else [tokens]), 4)))

    both = UntappedModel([(places, "model")], tapped, untapped)
    with pytest.raises(UntappedModelUnavailableError, match="only compiles for batches of 64 tokens"):
        both.compile(run, 64)
    constant.clear()
    both.compile(run, 64)
    # Pipeline stages before the last return no hidden states.
    both.compile(lambda tokens: None, 64)


def test_renamed_forward_keeps_the_decorated_signature() -> None:
    """Catches static input sizes: vLLM finds the dynamic ones by the signature of the decorated function."""

    class Model:
        @capture_outputs
        def forward(self, input_ids: int, scale: int = 2) -> int:
            return input_ids * scale

    renamed = _class_with_own_cache_key(Model)
    assert inspect.signature(renamed.forward) == inspect.signature(Model.forward)
    assert list(inspect.signature(renamed.forward).parameters) == ["self", "input_ids", "scale"]
    assert renamed().forward(3) == 6 and renamed().forward(3, scale=3) == 9
    assert renamed.forward.__code__ is not Model.forward.__code__
    assert renamed.forward.__qualname__ != Model.forward.__qualname__


def capture_outputs(forward: Any) -> Any:
    """Decorate like the models of Transformers."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapped


def test_shell_shares_everything_but_the_taps() -> None:
    """Catches duplicated parameters, and a forward of ours in the copy."""
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
    # A bound method stored as an attribute is rebound to the shell.
    assert shell[0].call.__self__ is shell[0] and layer.call.__self__ is layer


def test_requires_two_graph_sets() -> None:
    """Catches a single set of graphs, captured without taps, that replays for steered steps."""
    with pytest.raises(SteeringError, match="graph_sets"):
        SteeringConfig.parse({"plain_code": True, "graph_sets": 1})
    assert SteeringConfig.parse({"plain_code": True}).plain_code

# SPDX-License-Identifier: Apache-2.0
"""Probes with a hidden layer in readouts, gates and stops, against a token-by-token reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import hf
from tests.engine.answers import params, prompt, run
from tests.engine.record_cases import GENERATED, PROMPTS, add, check_all, expect, run_all
from tests.engine.record_reference import Expected, Reference
from tests.tiny import HIDDEN
from vllm_steer import SteeringError
from vllm_steer.request.probe import ACTIVATIONS
from vllm_steer.taps import mlp_head


def probe(activation: str = "relu", units: int = 24, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "weights": (rng.standard_normal((units, HIDDEN)) * 0.05).astype("f4"),
        "biases": rng.standard_normal(units).astype("f4"),
        "outputs": rng.standard_normal(units).astype("f4"),
        "activation": activation,
    }


READOUTS: dict[str, Any] = {
    name: {"probe": probe(name, 24 + number, number), "bias": 0.2, "sigmoid": name == "silu", "point": "post_block",
           "layer": 2 * (number % 2)}
    for number, name in enumerate(ACTIVATIONS)
}  # fmt: skip
CHOSEN = PROMPTS[:4]

Truth = tuple[dict[str, dict[str, Any]], dict[tuple[str, int], Expected]]


def cases(bounds: dict[str, float]) -> dict[str, dict[str, Any]]:
    def when(name: str, **fields: Any) -> dict[str, Any]:
        return {"readout": name, "above": bounds[name], **fields}

    return {
        "previous": {"edits": [add(layer=0, when=when("relu", window="previous"))]},
        "latch": {"edits": [add(layer=1, when=when("gelu", window="latch", release={"below": bounds["gelu"] - 0.5}))]},
        "prompt": {"edits": [add(layer=1, when=when("tanh", window="prompt", over="max"))]},
        "stop": {"stops": [{"readout": "silu", "above": bounds["silu"], "tokens": 2}]},
    }


@pytest.fixture(scope="module")
def truth(tiny_llama: Path) -> Truth:
    model = hf.load(tiny_llama)
    reference = Reference(model, model.model.layers)
    plain = [reference.run(tokens, GENERATED, READOUTS) for tokens in CHOSEN]
    bounds = {name: float(np.median(np.concatenate([each.scores[name] for each in plain]))) for name in READOUTS}
    maxima = sorted(
        float(np.max(each.scores["tanh"][: len(tokens)])) for each, tokens in zip(plain, CHOSEN, strict=True)
    )
    bounds["tanh"] = (maxima[1] + maxima[2]) / 2
    made = cases(bounds)
    return made, expect(reference, made, CHOSEN, READOUTS)


def compare(llm: Any, truth: Truth, probes: Mapping[str, Any] | None = None) -> None:
    """Run the cases, with other values of ``probe`` if ``probes`` has them, and compare them with the reference."""
    given = {name: each["probe"] for name, each in READOUTS.items()} if probes is None else probes
    readouts = {name: {**each, "probe": given[name]} for name, each in READOUTS.items()}
    check_all(run_all(llm, truth[0], CHOSEN, readouts=readouts), truth[1], CHOSEN)


def test_cases_are_decided(truth: Truth) -> None:
    """Catches cases that decide nothing."""
    for name in truth[0]:
        found = [truth[1][name, number] for number in range(len(CHOSEN))]
        assert min((margin for each in found for margin in each.margins), default=1.0) > 2e-5, name
        assert len({float(factor) for each in found for factor in each.factors.ravel()}) > 1 or found[0].stop, name


def test_every_window_and_stop(llm: Any, truth: Truth) -> None:
    """Catches an activation, bias or weight of another probe, and a value that comes behind the folding of a step."""
    compare(llm, truth)


@pytest.fixture
def module(llm: Any) -> Iterator[dict[str, str]]:
    """Register the probes as a module; yield their names in requests."""
    probes = {name: each["probe"] for name, each in READOUTS.items()}
    llm.steering.register("deep", probes={**probes, "flat": probe()["weights"][0]})
    yield {name: f"deep/{name}" for name in probes}
    llm.steering.delete("deep")


def test_probes_of_a_module(llm: Any, truth: Truth, module: dict[str, str]) -> None:
    """Catches a registered probe with the weights, biases or activation of another one."""
    compare(llm, truth, module)
    other = {**module, "gelu": module["relu"]}
    with pytest.raises(AssertionError):
        compare(llm, truth, other)


NAMED = {"probe": "deep/relu", "point": "post_block", "layer": 1}
MISUSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "window": ({"readouts": {"r": NAMED}, "steering": [add(layer=3, when={"readout": "r", "above": 0.0})]},
               "steering[0].when.window", "after the forward pass"),
    "cosine": ({"readouts": {"r": {**NAMED, "cosine": True}}}, "readouts.r.cosine", "omit it"),
    "one projection": ({"readouts": {"r": {"projections": ["deep/relu"], "point": "post_block", "layer": 1}}},
                       "readouts.r.projections[0]", "deep/relu has a hidden layer"),
    "projections": ({"readouts": {"r": {"projections": ["deep/flat", "deep/relu"], "point": "post_block", "layer": 1}}},
                    "readouts.r.projections[1]", "deep/relu has a hidden layer"),
    "capture": ({"capture": {"memory": {"hooks": {"post_block": [1]}, "reduce": {"probes": ["deep/relu"]}}}},
                "capture.memory.reduce.probes[0]", "deep/relu has a hidden layer"),
    "unknown": ({"readouts": {"r": {**NAMED, "probe": "deep/tanhh"}}}, "readouts.r.probe", "gelu, relu, silu, tanh"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MISUSES))
def test_refuses_misuses_of_a_module(llm: Any, module: dict[str, str], name: str) -> None:
    """Catches a hidden layer that is ignored, or read as a direction, because the request does not show it."""
    fields, path, words = MISUSES[name]
    with pytest.raises(SteeringError) as caught:
        run(llm, [prompt(1, 2, 3)], [params(**fields)])
    assert caught.value.field == path
    assert words in caught.value.problem


def test_comparison_detects_another_activation(llm: Any, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a hidden layer without its biases must be noticed."""
    real = mlp_head.MlpHead.values

    def wrong(self: Any, rows: Any) -> Any:
        biases, self._biases = self._biases, self._biases * 0
        value = real(self, rows)
        self._biases = biases
        return value

    monkeypatch.setattr(mlp_head.MlpHead, "values", wrong)
    with pytest.raises(AssertionError):
        compare(llm, truth)


READOUT = {"probe": probe(), "point": "post_block", "layer": 1}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"probe": {**probe(), "biases": np.zeros(3)}}, "readouts.r.probe.biases"),
    "outputs": ({"probe": {**probe(), "outputs": np.zeros(3)}}, "readouts.r.probe.outputs"),
    "not finite": ({"probe": {**probe(), "outputs": np.full(24, np.nan)}}, "readouts.r.probe.outputs[0]"),
    "missing": ({"probe": {"weights": probe()["weights"]}}, "readouts.r.probe.outputs"),
    "activation": ({"probe": {**probe(), "activation": "swish"}}, "readouts.r.probe.activation"),
    "key": ({"probe": {**probe(), "bias": 1.0}}, "readouts.r.probe"),
    "too wide": ({"probe": probe(units=257)}, "readouts.r.probe.weights"),
    "cosine": ({"cosine": True}, "readouts.r.cosine"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_refuses(name: str) -> None:
    """Catches probes whose parts do not fit together and reach the engine."""
    fields, path = BAD[name]
    with pytest.raises(SteeringError) as caught:
        params(readouts={"r": {**READOUT, **fields}})
    assert caught.value.field == path


def test_refuses_the_token_window() -> None:
    """Catches a gate on a value that is computed after the edit."""
    edit = add(layer=3, when={"readout": "r", "above": 0.0})
    with pytest.raises(SteeringError, match="after the forward pass") as caught:
        params(readouts={"r": READOUT}, steering=[edit])
    assert caught.value.field == "steering[0].when.window"


def test_refuses_another_width_and_too_many(llm: Any) -> None:
    """Catches weights of another width than the model's, and more of them than the engine's vector table holds."""
    narrow = {**READOUT, "probe": {**probe(), "weights": probe()["weights"][:, :-1]}}
    many = {f"r{i}": {**READOUT, "probe": probe(units=256, seed=i)} for i in range(9)}
    for readouts, words in (({"r": narrow}, "hidden size is 64"), (many, "max.vectors")):
        with pytest.raises(SteeringError, match=words):
            run(llm, [prompt(1, 2, 3)], [params(readouts=readouts)])

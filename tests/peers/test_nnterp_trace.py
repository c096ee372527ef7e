# SPDX-License-Identifier: Apache-2.0
"""Traces and refusals of the interface of nnterp, on an engine that returns numbered rows and applies no edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer import LLM, Edit, SteeringError
from vllm_steer.params import program_of
from vllm_steer.peers.engines import Engine as PeerEngine
from vllm_steer.peers.nnterp import StandardizedTransformer, logit_lens
from vllm_steer.points import POINTS

HIDDEN, LAYERS, VOCAB = 4, 3, 16
TOKENS = [5, 6, 7]
LOG_PROBABILITIES = torch.arange(VOCAB) * -10.0
"""Log-probabilities of each step, whose exponentials reach zero."""


def rows_of(layer: int, count: int) -> torch.Tensor:
    """Return rows that differ in all tokens and layers."""
    return torch.arange(count * HIDDEN, dtype=torch.float32).reshape(count, HIDDEN) + 100 * layer


class Engine:
    """Engine without a model."""

    finish_reason = "length"

    def __init__(self, **settings: Any) -> None:
        config = {"max_logprobs": -1, "logprobs_mode": "raw_logprobs", "logits_processors": None, **settings}
        model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB, **config)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config))
        altered = {"attn_out": [1], "mlp_out": [1]}
        points = [{"name": point, "altered": altered.get(point, [])} for point in POINTS]
        facts = {"num_layers": LAYERS, "hidden_size": HIDDEN, "points": points, "mixed_head": "the norm reads a mix"}
        self.capabilities = lambda: facts

    def generate(self, requests: Sequence[Any], params: Sequence[Any], use_tqdm: bool) -> list[Any]:
        return [self._run(each["prompt_token_ids"], own) for each, own in zip(requests, params, strict=True)]

    def _run(self, tokens: Sequence[int], params: Any) -> Any:
        count = len(tokens) + params.max_tokens - 1
        result = SimpleNamespace(status="ok", tensor=lambda point, layer: rows_of(layer, count))
        steps, self.params = range(params.max_tokens), params
        flat = SimpleNamespace(
            token_ids=[*range(VOCAB)] * len(steps),
            logprobs=LOG_PROBABILITIES.tolist() * len(steps),
            start_indices=[VOCAB * step for step in steps],
            end_indices=[VOCAB * (step + 1) for step in steps],
        )
        sample = SimpleNamespace(
            token_ids=[1] * params.max_tokens, logprobs=flat, finish_reason=self.finish_reason, stop_reason="boom"
        )
        return SimpleNamespace(outputs=[sample], capture_results={"memory": result})


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> StandardizedTransformer:
    """Return a model of which layer 1 alters its branches, and whose head mixes streams."""
    monkeypatch.setattr("vllm_steer.peers.engines.open_engine", lambda *_, **__: Engine())
    return StandardizedTransformer("model")


def other_token(model: Any) -> None:
    model.layers_output[1][:, 0] = model.layers_output[1][:, -1]


def one_token_to_all(model: Any) -> None:
    model.layers_output[1] = model.layers_output[1][:, -1]


def all_to_one(model: Any) -> None:
    model.layers_output[1][:, 0] = model.layers_output[1]


@pytest.mark.parametrize("write", [other_token, one_token_to_all, all_to_one])
def test_rows_of_other_tokens_of_the_site_are_refused(
    model: StandardizedTransformer, write: Callable[[Any], None]
) -> None:
    """Catches a write of a site's rows to other tokens of the site that is dropped without an error."""
    with (
        pytest.raises(SteeringError, match="of the same invoke cannot be written to other tokens"),
        model.trace(TOKENS),
    ):
        write(model)


def test_assigned_sites_are_refused(model: StandardizedTransformer) -> None:
    """Catches ``model.layers_output = rows`` and ``rows.output = value``, which nothing reads."""
    with pytest.raises(SteeringError, match=r"layers_output: cannot be assigned; write layers_output\[layer\]"):
        model.layers_output = torch.zeros(1)
    with pytest.raises(SteeringError, match="lm_head: is not a hook point; use project_on_vocab"):
        model.lm_head = torch.zeros(1)
    with pytest.raises(SteeringError, match=r"output of rows cannot be assigned"), model.trace(TOKENS):
        model.layers_output[1].output = torch.zeros(1)


def test_misspelt_attributes(model: StandardizedTransformer) -> None:
    """Catches an error without the name that is meant, of a site or of a method."""
    for name, meant in {"layers_ouput": "layers_output", "project_on_vocb": "project_on_vocab"}.items():
        with pytest.raises(AttributeError, match=f"has no attribute {name}; did you mean {meant}\\?"):
            getattr(model, name)
    with pytest.raises(AttributeError, match=r"has no attribute something$"):
        _ = model.something
    with pytest.raises(AttributeError, match=r"has no attribute trace$"):
        StandardizedTransformer.__getattr__(model, "trace")


def test_rows_are_written_once(model: StandardizedTransformer) -> None:
    """Catches ``rows += vector``, which assigns the rows to themselves, as a second write or a refusal."""
    with model.trace(TOKENS) as tracer:
        model.layers_output[1] += torch.ones(HIDDEN)
        model.layers_output[1][:, -1] *= 0.5
        model.layers_output[1][:, 2] = model.layers_output[1][:, -1]
        model.layers_output[1] = model.layers_output[1][:, 0:3]
    assert [kind for kind, _, _ in tracer.invokes[0].writes] == ["add", "scale"]


def test_saved_rows_are_changed_in_place(model: StandardizedTransformer) -> None:
    """Catches arithmetic on rows after the trace that changes nothing."""
    with model.trace(TOKENS):
        rows, other = model.layers_output[1].save(), model.layers_output[1].save()
    expected = rows_of(1, len(TOKENS))[None]
    same, mean = rows, expected.mean(1)
    rows -= mean
    rows += other
    rows *= torch.full((HIDDEN,), 2.0)
    rows[:, 0] = torch.zeros(HIDDEN)
    rows[:, 1] += 1.0
    right = 2 * (2 * expected - mean)
    right[:, 0] = 0
    right[:, 1] += 1
    torch.testing.assert_close(rows.value, right)
    assert rows is same
    torch.testing.assert_close(other.value, expected)


def test_rows_without_a_value_are_not_changed_after_the_trace(model: StandardizedTransformer) -> None:
    """Catches arithmetic on rows that were not saved, recorded for a trace that has run."""
    with model.trace(TOKENS):
        rows = model.layers_output[1]
    with pytest.raises(SteeringError, match="the trace has ended"):
        rows += torch.ones(HIDDEN)
    with pytest.raises(SteeringError, match="the trace has ended"):
        rows[:, 0] = torch.ones(HIDDEN)


def test_a_tensor_is_written_as_it_is_in_its_line(model: StandardizedTransformer) -> None:
    """Catches a tensor that later lines of the trace change in place, and that is then written with its last values."""
    vector = torch.zeros(HIDDEN)
    with model.trace(TOKENS, max_new_tokens=3) as tracer:
        for _ in tracer.iter[:]:
            vector += 1.0
            model.layers_output[0][:, -1] += vector
            model.layers_output[0][:, -1] = vector
        vector += 1.0
        invoke = tracer.current()
    assert [value.tolist() for _, _, value in invoke.writes] == [[float(i)] * HIDDEN for i in (1, 1, 2, 2, 3, 3)]


def test_log_probabilities_have_no_least_number(
    model: StandardizedTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches logarithms of probabilities, which are infinite where these are zero in float32."""
    monkeypatch.setattr(model, "mixed_head", None)
    with model.trace(TOKENS, max_new_tokens=2) as tracer:
        first = model.logits.save()
        with tracer.iter[1]:
            second, probs = model.logits.save(), model.next_token_probs.save()
    for found in (first.value, second.value, model.project_on_vocab(torch.zeros(1, 1, HIDDEN))):
        assert torch.equal(found, LOG_PROBABILITIES[None, None])
    assert torch.equal(probs.value, LOG_PROBABILITIES.exp()[None])
    assert torch.equal(model.next_token_probs([TOKENS]), LOG_PROBABILITIES.exp()[None])


def test_saved_values_compute_as_tensors(model: StandardizedTransformer) -> None:
    """Catches a list of saved rows that torch cannot stack, and operators of tensors that saved values lack."""
    with model.trace(TOKENS):
        saved = [model.layers_output[layer][:, -1].save() for layer in (0, 2)]
        probs = model.next_token_probs.save()
        with pytest.raises(SteeringError, match="rows have no values within the trace"):
            len(saved[0])
        with pytest.raises(SteeringError, match="exists after the trace"):
            torch.stack(saved)
        with pytest.raises(SteeringError, match="mean is not an operation of a trace; save the value"):
            model.layers_output[1].mean(1)
        with pytest.raises(SteeringError, match="rows have no values within the trace"):
            bool(saved[0] == saved[1])
    rows = [each.value for each in saved]
    assert torch.equal(torch.stack(saved), torch.stack(rows))
    assert torch.equal(torch.cat(tensors=saved, dim=-1), torch.cat(rows, dim=-1))
    first, second = saved
    for found, right in (
        (1 + first, 1 + rows[0]),
        (1 - first, 1 - rows[0]),
        (2 * first / 4, 2 * rows[0] / 4),
        (1 / (first + 1), 1 / (rows[0] + 1)),
        (abs(-first) ** 2, rows[0] ** 2),
        (first < second, rows[0] < rows[1]),
        (first >= second, rows[0] >= rows[1]),
        (first == second, rows[0] == rows[1]),
        (first != second, rows[0] != rows[1]),
        (probs[0] * 2, probs.value[0] * 2),
        (torch.from_numpy(np.asarray(second)), rows[1]),
    ):
        assert torch.equal(found, right)
    assert (len(first), len(probs), bool((first <= second).all())) == (1, 1, True)


def test_generate_keeps_its_own_steering(model: StandardizedTransformer) -> None:
    """Catches edits of ``generate`` that are dropped within ``steer``."""
    edit = Edit(kind="add", point="post_block", layers=2, vector=torch.ones(HIDDEN))
    with model.steer(1, torch.ones(HIDDEN)):
        model.generate([TOKENS], 2, steering=[edit])
    program = program_of(model.llm.params)
    assert program is not None
    assert [each.layers for each in program.edits] == [(1,), (2,)]


def test_counts_of_numpy_are_sent_as_integers(model: StandardizedTransformer) -> None:
    """Catches a request that cannot be sent, for whose answer the next call waits without end."""
    model.generate([TOKENS], np.int64(2))
    assert type(model.llm.params.max_tokens) is int


def test_steps_end_with_a_break(model: StandardizedTransformer) -> None:
    """Catches reads behind a loop that was left early, taken from the step in which it was left."""
    with model.trace(TOKENS, max_new_tokens=3) as tracer:
        for step in tracer.iter[:]:
            if step == 1:
                within = model.layers_output[0].save()
                break
        behind = model.layers_output[0].save()
    assert (within.step, behind.step) == (1, 0)
    assert (within.shape, behind.shape) == ((1, 1, HIDDEN), (1, len(TOKENS), HIDDEN))


@pytest.mark.parametrize(("name", "point"), [("attentions_output", "attn_out"), ("mlps_output", "mlp_out")])
def test_outputs_of_modules_that_the_layer_alters_are_refused(
    model: StandardizedTransformer, name: str, point: str
) -> None:
    """Catches rows behind a layer's norm returned or written as the output of attention or MLP."""
    for layers in ([1], [0, 1]):
        with pytest.raises(SteeringError, match=f"{name}: .*layer 1 of this model.*use {point}"):
            model.get_token_activations([TOKENS], layers, name)
    assert model.get_token_activations([TOKENS], [0, 2], name).shape == (2, len(TOKENS), HIDDEN)
    assert model.get_token_activations([TOKENS], [1], point).shape == (1, len(TOKENS), HIDDEN)
    with model.trace(TOKENS):
        getattr(model, name)[0].save()
        with pytest.raises(SteeringError, match=name):
            getattr(model, name)[1]


def test_requests_that_ended_with_an_error_raise(model: StandardizedTransformer) -> None:
    """Catches the prompt alone as the result of a trace, and values that are missing without the reason."""
    model.llm.finish_reason = "error"
    with pytest.raises(RuntimeError, match=r"prompts\[0\]: boom"), model.trace(TOKENS, max_new_tokens=2) as tracer:
        tracer.result.save()
    with pytest.raises(RuntimeError, match=r"prompts\[0\]: boom"):
        model.next_token_probs([TOKENS])
    assert model.generate([TOKENS])[0].outputs[0].finish_reason == "error"  # the engine's own outputs


def test_a_head_that_mixes_streams_is_refused(model: StandardizedTransformer) -> None:
    """Catches the streams of another token mixed into a projection."""
    row = torch.ones(HIDDEN)
    for call in (
        lambda: model.project_on_vocab(row),
        lambda: model.get_topk_closest_tokens(row),
        lambda: logit_lens(model, [TOKENS]),
    ):
        with pytest.raises(SteeringError, match=r"project_on_vocab: is not supported on this model: .* a mix"):
            call()


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, False),
        ({"logprobs_mode": "processed_logprobs"}, False),
        ({"logprobs_mode": "processed_logprobs", "logits_processors": ["mine"]}, True),
        ({"logprobs_mode": "raw_logits"}, True),
        ({"logprobs_mode": "processed_logits"}, True),
    ],
)
def test_engines_that_return_other_scores_are_refused(
    settings: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches logits taken for log-probabilities, on a running engine and in the settings of a new one."""
    running = LLM.__new__(LLM)
    vars(running).update(vars(Engine(**settings)))
    monkeypatch.setattr(LLM, "__init__", lambda self, *args, **kwargs: vars(self).update(vars(running)))
    for model, arguments in ((running, {}), ("model", settings)):
        if refused:
            with pytest.raises(SteeringError, match="logprobs_mode"):
                PeerEngine(model, **arguments)
        else:
            assert PeerEngine(model, **arguments).num_layers == LAYERS


def test_engines_without_steering_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine without steering that fails later, or an error about an argument that was not given."""
    running = LLM.__new__(LLM)
    vars(running).update(llm_engine=Engine().llm_engine)
    monkeypatch.setattr("vllm_steer.llm.engine_context", lambda engine: None)
    with pytest.raises(SteeringError, match="model: the engine runs without steering"):
        PeerEngine(running)
    with pytest.raises(SteeringError, match="capabilities: the engine runs without steering"):
        running.capabilities()


OPERATORS = ["add", "sub", "mul", "truediv", "pow", "matmul", "eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", [*OPERATORS, "neg", "abs", "getitem", "radd", "rsub", "rmul", "rtruediv"])
def test_saved_values_have_the_operators_of_tensors(model: StandardizedTransformer, name: str) -> None:
    """Catches an operator of tensors that saved values lack, or that computes another one."""
    with model.trace(TOKENS):
        saved = model.layers_output[1].save()
    rows = rows_of(1, len(TOKENS))[None]
    arguments = {"neg": (), "abs": (), "getitem": (0,), "matmul": (torch.ones(HIDDEN),)}.get(name, (3.0,))
    found = getattr(type(saved), f"__{name}__")(saved, *arguments)
    assert torch.equal(found, getattr(rows, f"__{name}__")(*arguments))

# SPDX-License-Identifier: Apache-2.0
"""A trained chat model with a chat template: 24 requests of eight kinds in one batch, against HF Transformers.

The tiny models have random weights. This one has what training brings: a first token whose stream is many times longer
than the others', confident predictions, and messages with roles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from demo.measures import log_odds, perplexities
from demo.texts import CHOICE, MOOD, OTHER_REQUESTS, SAD_REQUESTS, SHOWN, STREAMED
from tests.conformance.edits import Formula
from tests.conformance.hf_reference import Intervention, Reference, Trace
from tests.conformance.model import TinyModel
from tests.engine.conftest import close
from tests.repo.tree import ROOT
from tests.tiny import make_llm
from vllm_steer import Edit, SamplingParams

MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="the chat model is missing: run `make model`"),
]
HIDDEN, LAYERS, TOKENS = 576, 30, 5
TOP = 5
"""Log-probabilities of each token that are compared."""


class Tolerance(NamedTuple):
    """Bounds of differences from HF Transformers."""

    logprob: float
    row: float
    """In lengths of the row."""
    score: float
    """Of scores of the probe and log-probabilities of the lens."""
    effect: float
    """Smallest change of a log-probability by the edits of a request."""


CLOSE = Tolerance(logprob=5e-4, row=5e-4, score=5e-3, effect=5e-2)
RANDOM = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float32)
ADDED, REMOVED, WEIGHTS = RANDOM[0] * 1.2, RANDOM[1], RANDOM[2] / 24
"""A vector of 0.2 lengths of the stream, a direction, and the weights of a probe."""
QUESTIONS = (
    *CHOICE, *SHOWN, *SAD_REQUESTS, *OTHER_REQUESTS, *STREAMED, "Who are you?", "Name a fruit.", "What is 2 + 2?",
    "Translate 'dog' to French.", "Give me a rhyme on 'cat'.", "Is the earth flat?", "Say hello.", "What is a vector?",
)  # fmt: skip
PROBE = {"probe": WEIGHTS, "bias": 0.5, "point": "post_block", "layer": 6}

Edits = Callable[[Sequence[int], int], list[Intervention]]
"""Edits of a request in the reference, from its prompt and the number of tokens that the model runs on."""


def add_here(tokens: Sequence[int], length: int) -> list[Intervention]:
    return [Intervention("post_block", 8, range(length), Formula("add", ADDED))]


def remove_everywhere(tokens: Sequence[int], length: int) -> list[Intervention]:
    return [Intervention("post_block", layer, range(1, length), Formula("ablate", REMOVED)) for layer in range(LAYERS)]


def clamp_the_user(tokens: Sequence[int], length: int) -> list[Intervention]:
    """ChatML: the last message but the header of the answer, from its begin token to its end token."""
    *_, begin, _ = (place for place, token in enumerate(tokens) if token == 1)
    end = len(tokens) - 1 - list(reversed(tokens)).index(2)
    return [Intervention("pre_attn", 12, range(begin, end + 1), Formula("clamp", ADDED, low=20.0))]


def push_the_answer(tokens: Sequence[int], length: int) -> list[Intervention]:
    return [Intervention("post_attn", 20, range(len(tokens), length), Formula("add_normed", ADDED, strength=0.3))]


def none(tokens: Sequence[int], length: int) -> list[Intervention]:
    return []


@dataclass(frozen=True)
class Case:
    """A kind of request: its fields, and the same edits in the reference."""

    fields: dict[str, Any]
    edits: Edits = none


READ = {"hooks": {"pre_attn": [0], "post_attn": [15], "post_block": [8, 29]}, "positions": "all", "dtype": "float32"}
CASES = {
    "plain": Case({}),
    "add": Case({"steering": [Edit("add", point="post_block", layers=8, vector=ADDED)]}, add_here),
    "ablate": Case(
        {"steering": [Edit("ablate", point="post_block", layers="all", vector=REMOVED, tokens=[[1, None]])]},
        remove_everywhere,
    ),
    "clamp": Case(
        {"steering": [Edit("clamp", point="pre_attn", layers=12, vector=ADDED, low=20.0, tokens="user")]},
        clamp_the_user,
    ),
    "add_normed": Case(
        {
            "steering": [
                Edit("add_normed", point="post_attn", layers=20, vector=ADDED, strength=0.3, tokens="generated")
            ]
        },
        push_the_answer,
    ),
    "capture": Case(
        {"steering": [Edit("add", point="post_block", layers=8, vector=ADDED)], "capture": {"memory": READ}}, add_here
    ),
    "readouts": Case(
        {
            "readouts": {
                "probe": {**PROBE, "positions": "all"},
                "lens": {"lens": {"top_k": 3}, "point": "post_block", "layers": [10, 29], "positions": "all"},
            }
        }
    ),
    "gate": Case({}),
}


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    engine = make_llm(MODEL, max_model_len=256, max_num_seqs=32, skip_tokenizer_init=False, num_gpu_blocks_override=64)
    yield engine
    close(engine)


@pytest.fixture(scope="module")
def tolerance() -> Tolerance:
    return CLOSE


def load_reference(dtype: torch.dtype) -> Reference:
    """Return the model with weights of a dtype, which computes in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).float().eval()
    return Reference(TinyModel("chat", "LlamaConfig", {}, "FUSED", "LlamaDecoderLayer"), model)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return load_reference(torch.float32)


@dataclass(frozen=True)
class Answer:
    """A request, its output, and what HF Transformers computes for the same tokens with the same edits."""

    name: str
    output: Any
    trace: Trace
    start: int
    """Place of the row of the last prompt token."""


@pytest.fixture(scope="module")
def bound(reference: Reference, llm: Any) -> float:
    """Return a bound in the middle of the probe's scores of the gated prompts, as far from all of them as possible."""
    ids = [llm.get_tokenizer().apply_chat_template(chat(question), add_generation_prompt=True, return_dict=False)
           for question in QUESTIONS[7::8]]  # fmt: skip
    scores = np.sort(np.concatenate([score(reference.run(tokens)) for tokens in ids]))
    middle = scores[len(scores) // 3 : 2 * len(scores) // 3]
    place = int(np.diff(middle).argmax())
    return float(middle[place : place + 2].mean())


def score(trace: Trace) -> np.ndarray:
    return trace.x_out[6] @ WEIGHTS + 0.5


@pytest.fixture(scope="module")
def answers(llm: Any, reference: Reference, bound: float) -> list[Answer]:
    """Run all requests in one batch, and the reference on their tokens, with the gates where the engine's scores open.

    :func:`test_gates_open_where_the_score_is_high` compares these scores with the reference's.
    """
    when = {"readout": "probe", "above": bound}
    edit = Edit("add", point="post_block", layers=10, vector=ADDED, when=when)
    gate = Case({"readouts": {"probe": {**PROBE, "positions": "all"}}, "steering": [edit]})
    cases = {**CASES, "gate": gate}
    names = [list(cases)[number % len(cases)] for number in range(len(QUESTIONS))]
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=TOP, **cases[name].fields)
        for name in names
    ]
    outputs = llm.chat([chat(question) for question in QUESTIONS], params, use_tqdm=False)
    found = []
    for name, output in zip(names, outputs, strict=True):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        edits = cases[name].edits(output.prompt_token_ids, len(tokens))
        if name == "gate":
            above = np.flatnonzero(output.outputs[0].readouts["probe"].values > bound)
            edits = [Intervention("post_block", 10, above.tolist(), Formula("add", ADDED))]
        found.append(Answer(name, output, reference.run(tokens, edits), len(output.prompt_token_ids) - 1))
    return found


def of(answers: Sequence[Answer], *names: str) -> list[Answer]:
    return [answer for answer in answers if answer.name in names]


def test_log_probabilities_equal_hf(answers: list[Answer], tolerance: Tolerance) -> None:
    """Catches an edit that is missing, at another token, or of another request in the batch."""
    assert len(answers) == 24
    for answer in answers:
        for place, step in enumerate(answer.output.outputs[0].logprobs):
            right = answer.trace.logprobs[answer.start + place]
            for token, each in step.items():
                assert abs(each.logprob - right[token]) < tolerance.logprob, (answer.name, place)
            assert right.max() - max(right[token] for token in step) < tolerance.logprob, (answer.name, place)


def test_every_edit_matters(answers: list[Answer], reference: Reference, tolerance: Tolerance) -> None:
    """Negative control: without its edits, the reference is clearly another."""
    for answer in of(answers, "add", "ablate", "clamp", "add_normed", "gate"):
        tokens = [*answer.output.prompt_token_ids, *answer.output.outputs[0].token_ids[:-1]]
        plain = reference.run(tokens).logprobs[answer.start :]
        assert np.abs(plain - answer.trace.logprobs[answer.start :]).max() > tolerance.effect, answer.name


def test_captured_rows_equal_hf(answers: list[Answer], tolerance: Tolerance) -> None:
    """Catches rows of another layer, point or request, and rows from before the edit."""
    for answer in of(answers, "capture"):
        rows = answer.output.outputs[0].capture_results["memory"]
        streams = {"pre_attn": answer.trace.x_in, "post_attn": answer.trace.x_mid, "post_block": answer.trace.x_out}
        assert rows.status == "ok"
        assert len(rows.sites) == 4
        for point, layer in rows.sites:
            right = streams[point][layer]
            away = np.linalg.norm(rows.tensor(point, layer).numpy() - right, axis=1) / np.linalg.norm(right, axis=1)
            assert away.max() < tolerance.row, (point, layer)


def test_the_first_token_is_massive(answers: list[Answer], tolerance: Tolerance) -> None:
    """Catches rows of a model that is not trained, and a first row that was lost or shifted.

    This is why the demo leaves the first token out of means and ablations: its row is long and independent of the text.
    """
    rows = [answer.output.outputs[0].capture_results["memory"].tensor("post_block", 8).numpy() for answer in
            of(answers, "capture")]  # fmt: skip
    for each in rows:
        lengths = np.linalg.norm(each, axis=1)
        assert lengths[0] > 4 * np.median(lengths)
        np.testing.assert_allclose(each[0], rows[0][0], atol=tolerance.row * lengths[0])


def test_scores_and_lens_equal_hf(answers: list[Answer], reference: Reference, tolerance: Tolerance) -> None:
    """Catches scores of shifted tokens, a lens without the final norm, and one at another layer."""
    for answer in of(answers, "readouts"):
        found = answer.output.outputs[0].readouts
        np.testing.assert_allclose(found["probe"].values, score(answer.trace), atol=tolerance.score)
        for place, layer in enumerate((10, 29)):
            with torch.no_grad():
                rows = torch.from_numpy(answer.trace.x_out[layer])
                right = reference.model.lm_head(reference.model.model.norm(rows)).log_softmax(-1)
            best = right.topk(3).values.numpy()
            np.testing.assert_allclose(found["lens"].logprobs[:, place], best, atol=tolerance.score)


def test_gates_open_where_the_score_is_high(answers: list[Answer], bound: float, tolerance: Tolerance) -> None:
    """Catches a gate that decides by another token or another score, and a bound that decides nothing."""
    for answer in of(answers, "gate"):
        scores = answer.output.outputs[0].readouts["probe"].values
        np.testing.assert_allclose(scores, score(answer.trace), atol=tolerance.score)
        right = scores > bound
        assert np.abs(scores - bound).min() > 1e-5
        assert right.any() and not right.all()
        gates = answer.output.outputs[0].steering_trace.gates[:, 0]
        assert gates.astype(bool).tolist() == right[answer.start + 1 :].tolist()


def test_later_turns_reuse_the_cache_and_keep_the_answer(llm: Any) -> None:
    """Catches cached blocks of a steered turn in a plain one, and a second turn that begins from nothing."""
    story = "Once upon a time there was a small village by the sea. " * 12
    turns = [*chat(story), {"role": "assistant", "content": "What happened there?"}, *chat("Tell me.")]
    steered = {"steering": [Edit("add", point="post_block", layers=8, vector=ADDED)]}

    def ask(messages: Any, **fields: Any) -> Any:
        wanted = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1, **fields)
        return llm.chat(messages, wanted, use_tqdm=False)[0]

    llm.reset_prefix_cache()
    fresh = {name: ask(turns, **fields) for name, fields in (("plain", {}), ("steered", steered))}
    llm.reset_prefix_cache()
    for name, fields in (("steered", steered), ("plain", {})):
        first = ask(turns[:1], **fields)
        assert not first.num_cached_tokens, name
        second = ask(turns, **fields)
        assert second.num_cached_tokens >= 128, name
        for got, right in zip(second.outputs[0].logprobs, fresh[name].outputs[0].logprobs, strict=True):
            assert [*got] == [*right], name
            (a,), (b,) = ([each.logprob for each in list(step.values())[:1]] for step in (got, right))
            assert abs(a - b) < CLOSE.logprob, name
    assert fresh["plain"].outputs[0].token_ids != fresh["steered"].outputs[0].token_ids


def test_the_demo_measures_what_it_says(llm: Any, reference: Reference, answers: list[Answer]) -> None:
    """Catches a perplexity of the prompt's tokens or of shifted ones, and log-odds of other words or another token."""
    plain = of(answers, "plain")
    losses = []
    for answer in plain:
        ids = answer.output.outputs[0].token_ids
        rows = answer.trace.logprobs[answer.start :]
        losses += [-rows[place, token] for place, token in enumerate(ids)]
    right = np.exp(np.mean(losses))
    assert perplexities(llm, [[answer.output for answer in plain]]) == [pytest.approx(right, rel=1e-3)]

    tokenizer = llm.get_tokenizer()
    tokens = tokenizer.encode("Today I feel so", add_special_tokens=False)
    after = reference.run(tokens).logprobs[-1]
    plus, minus = (
        np.logaddexp.reduce([after[tokenizer.encode(f" {word}", add_special_tokens=False)[0]] for word in words])
        for words in (MOOD.plus_words, MOOD.minus_words)
    )
    assert log_odds(llm, MOOD, [[]], ["Today I feel so"])[0, 0] == pytest.approx(plus - minus, abs=CLOSE.logprob * 4)


def test_the_template_marks_roles(llm: Any) -> None:
    """Catches a role that covers other tokens than its messages: the scored text is the message."""
    messages = [{"role": "system", "content": "Be brief."}, *chat("Name a fruit.")]
    readouts = {role: {**PROBE, "positions": role} for role in ("system", "user")}
    output = llm.chat(messages, SamplingParams(max_tokens=1, readouts=readouts), use_tqdm=False)[0]
    tokenizer = llm.get_tokenizer()
    for message in messages:
        positions = output.outputs[0].readouts[message["role"]].positions
        text = tokenizer.decode([output.prompt_token_ids[place] for place in positions])
        assert re.fullmatch(rf"<\|im_start\|>{message['role']}\n{message['content']}<\|im_end\|>", text), text

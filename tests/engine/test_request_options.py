# SPDX-License-Identifier: Apache-2.0
"""Tests of steering beside penalties, seeds, log-probabilities, grammars and prompt embeddings.

All of these start from log-probabilities, which in a steered request come from the edited stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.answers import run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import opened
from tests.tiny import direction
from vllm_steer import SamplingParams, SteeringError
from vllm_steer.frontend.prompt_tokens import check_mask

MODEL = Path(__file__).parents[2] / "demo" / "model"
TEXT = "Once upon a time"
SITE = {"post_block": {1: direction(1, 1.0, 256)}}


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    """Return the demo model, whose tokens are words."""
    with opened(MODEL, skip_tokenizer_init=False, max_model_len=128, max_num_seqs=16, max_logprobs=-1,
                      enable_prompt_embeds=True) as engine:  # fmt: skip
        yield engine


def params(max_tokens: int = 8, **fields: Any) -> Any:
    given = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": -1}
    return SamplingParams(**{**given, **fields})


def rows_of(steps: Any) -> np.ndarray:
    """Return log-probabilities ``[steps, vocabulary]``."""
    return np.array([[step[token].logprob for token in range(len(step))] for step in steps])


@pytest.mark.feature("log-probabilities, of prompt and answer", "steer", "capture")
def test_prompt_logprobs_match_generation(llm: Any) -> None:
    """Catches prompt logits that bypass the edits, or captures that change them."""
    output = run(llm, [TEXT], [params(steering_vectors=SITE)])[0]
    whole = {"prompt_token_ids": [*output.prompt_token_ids, *tokens_of(output)]}
    cases = [
        params(1, prompt_logprobs=-1, steering_vectors=SITE, capture=capture()),
        params(1, prompt_logprobs=-1),
    ]
    steered, plain = (
        rows_of(each.prompt_logprobs[len(output.prompt_token_ids) :]) for each in run(llm, [whole] * 2, cases)
    )
    right = rows_of(output.outputs[0].logprobs)
    np.testing.assert_allclose(steered, right, atol=1e-3)
    assert np.abs(plain - right).max() > 1e-2


@pytest.mark.feature("penalties and logit bias", "steer", "capture")
def test_penalties_use_steered_logits(llm: Any) -> None:
    """Catches penalties on other logits than the steered ones, or for another request's tokens."""
    settings = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {11: 2.0}}
    plain, steered = run(
        llm, [TEXT] * 2, [params(16, **settings), params(16, steering_vectors=SITE, capture=capture(), **settings)]
    )
    assert tokens_of(plain) != tokens_of(steered)
    assert result(steered).positions("post_block", 1).tolist() == list(range(len(steered.prompt_token_ids) + 15))
    unpenalised = 0
    for output in (plain, steered):
        counts = np.zeros(len(output.outputs[0].logprobs[0]))
        for token, raw in zip(tokens_of(output), rows_of(output.outputs[0].logprobs), strict=True):
            expected = raw - 1.5 * (counts > 0) - 0.5 * counts
            expected[11] += 2.0
            assert expected[token] >= expected.max() - 1e-3
            unpenalised += token != raw.argmax()
            counts[token] += 1
    assert unpenalised, "nothing was decided by a penalty"


@pytest.mark.feature("grammars", "steer", "capture")
def test_grammars_mask_steered_logits(llm: Any) -> None:
    """Catches a grammar that masks another request's or unsteered logits, and rows that are lost beside it."""
    letters, length = ("abcdefghijklm ", "nopqrstuvwxyz "), 14
    words = [word.replace("\u0120", " ") for word in llm.get_tokenizer().convert_ids_to_tokens(range(4096))]
    cases = [(own, fields) for fields in ({}, {"steering_vectors": SITE, "capture": capture()}) for own in letters]
    grammars = [StructuredOutputsParams(regex=f"[{own}]{{{length}}}") for own, _ in cases]
    given = [
        params(length, ignore_eos=False, structured_outputs=g, **o) for g, (_, o) in zip(grammars, cases, strict=True)
    ]
    decided = 0
    for (own, fields), output in zip(cases, run(llm, [TEXT] * 4, given), strict=True):
        # vLLM masks the log-probabilities of a request with a grammar, but not of its text as a prompt.
        answer, start = tokens_of(output), len(output.prompt_token_ids)
        whole = {"prompt_token_ids": [*output.prompt_token_ids, *answer]}
        free, other = run(
            llm, [whole] * 2,
            [params(1, prompt_logprobs=-1, **each) for each in (fields, {} if fields else {"steering_vectors": SITE})],
        )  # fmt: skip
        text = ""
        for token, row, wrong in zip(answer, *(rows_of(r.prompt_logprobs[start:]) for r in (free, other)), strict=True):
            fits = [set(word) <= set(own) and 0 < len(word) <= length - len(text) for word in words]
            if not any(fits):
                break  # it is whole, and what comes is its end
            assert row[token] >= row[fits].max() - 1e-3
            decided += token != row.argmax() and wrong[token] < wrong[fits].max() - 1e-3
            text += words[token]
        assert (len(text), set(text) <= set(own)) == (length, True)
        if fields:
            positions = result(output).positions("post_block", 1)
            assert positions.tolist() == list(range(start + len(answer) - 1))
            torch.testing.assert_close(
                result(output).tensor("post_block", 1), result(free).tensor("post_block", 1)[: len(positions)],
                atol=2e-3, rtol=1e-4,
            )  # fmt: skip
    assert decided, "no word depends on both the grammar and the edit"


def test_a_stop_string_is_not_the_stop_of_a_readout(llm: Any) -> None:
    """Catches a stop string that is taken for the reason of a stop, after which the last token seemed to be forwarded.

    The capture then lacked a row, and its status was `partial`.
    """
    probe = {"probe": direction(2, 0.05, 256), "point": "post_block", "layer": 2}
    wanted = params(
        30, structured_outputs=StructuredOutputsParams(regex="readout is [a-z]{20}"), stop=["readout is"],
        readouts={"late": probe}, stop_on=[{"readout": "late", "above": 1e6}], capture=capture(),
    )  # fmt: skip
    (output,) = run(llm, [TEXT], [wanted])
    sample = output.outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "readout is")
    forwarded = len(output.prompt_token_ids) + len(sample.token_ids) - 1
    assert result(output).positions("post_block", 1).tolist() == list(range(forwarded))


@pytest.mark.feature("seeded sampling", "steer", "capture")
def test_seeded_draws_do_not_depend_on_the_batch(llm: Any) -> None:
    """Catches draws that depend on other requests, and captures that consume one."""

    def wanted(seed: int) -> Any:
        return params(
            12, temperature=1.0, seed=seed, steering_vectors=SITE if seed % 2 else None,
            capture=capture() if seed > 2 else None, skip_reading_prefix_cache=True,
        )  # fmt: skip

    together = run(llm, [TEXT] * 6, [wanted(seed) for seed in range(6)])
    assert len({tuple(tokens_of(each)) for each in together}) == 6
    for seed in (0, 1, 3, 4):
        alone = run(llm, [TEXT], [wanted(seed)])[0]
        assert tokens_of(alone) == tokens_of(together[seed])
        if seed > 2:
            close_to(result(together[seed]), result(alone), seed)


@pytest.mark.feature("prompts of embeddings", "steer", "capture")
def test_prompt_embeddings_match_tokens(llm: Any) -> None:
    """Catches edits and captures that count positions by missing token ids, and a token reported for an embedding."""
    edited = params(steering_vectors=SITE, prefill_steering_vectors={"pre_attn": {2: SITE["post_block"][1]}},
                   capture=capture())  # fmt: skip
    by_tokens, plain = run(llm, [TEXT] * 2, [edited, params()])
    table = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"].float()
    embedded = run(llm, [{"prompt_embeds": table[by_tokens.prompt_token_ids]}], [edited])[0]
    right, wrong = (rows_of(each.outputs[0].logprobs[:1]) for each in (by_tokens, plain))
    np.testing.assert_allclose(rows_of(embedded.outputs[0].logprobs[:1]), right, atol=1e-3)
    assert tokens_of(embedded) == tokens_of(by_tokens)
    assert np.abs(right - wrong).max() > 1e-2
    close_to(result(embedded), result(by_tokens))
    count = len(by_tokens.prompt_token_ids)
    site = "post_block", 1
    assert result(by_tokens).token_ids(*site)[:count].tolist() == by_tokens.prompt_token_ids
    assert result(embedded).token_ids(*site).tolist() == [-1] * count + tokens_of(by_tokens)[:-1]


def test_tokens_beside_embeddings(llm: Any) -> None:
    """Catches the placeholder token at the position of an embedding reported as the prompt's, and a mask that is lost.

    The placeholders have another embedding, so the rows show that the position had the embedding.
    """
    captured = params(capture=capture())
    by_tokens = run(llm, [TEXT], [captured])[0]
    tokens = by_tokens.prompt_token_ids
    table = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"].float()
    mask = [position % 2 == 0 for position in range(len(tokens))]
    mixed = {
        "prompt_embeds": table[tokens],
        "prompt_token_ids": [token if real else 7 for token, real in zip(tokens, mask, strict=True)],
        "prompt_is_token_ids": mask,
    }
    found = result(run(llm, [mixed], [captured])[0])
    close_to(found, result(by_tokens))
    expected = [token if real else -1 for token, real in zip(tokens, mask, strict=True)]
    assert found.token_ids("post_block", 1)[: len(tokens)].tolist() == expected
    assert found.data.prompt_token_ids == tuple(expected)


@pytest.mark.parametrize(
    ("left_out", "words"),
    [("prompt_is_token_ids", "is missing"), ("prompt_token_ids", "needs both"), ("prompt_embeds", "needs both")],
)
def test_unknown_positions_of_embeddings_are_refused(left_out: str, words: str) -> None:
    """Catches tokens reported for positions of which it is unknown whether they have a token or an embedding."""
    given: dict[str, Any] = {
        "prompt_token_ids": [1, 2], "prompt_embeds": torch.zeros(2, 4), "prompt_is_token_ids": [True, False],
    }  # fmt: skip
    check_mask(SimpleNamespace(**given))
    with pytest.raises(SteeringError, match=rf"prompt_is_token_ids: {words}"):
        check_mask(SimpleNamespace(**{**given, left_out: None}))
    with pytest.raises(SteeringError, match="3 values for 2 tokens"):
        check_mask(SimpleNamespace(**{**given, "prompt_is_token_ids": [True, False, True]}))


def test_mask_is_checked_at_the_edge(llm: Any) -> None:
    """Catches a steered prompt whose unknown mask is not refused before the engine."""
    prompt = {"prompt_embeds": torch.zeros(2, 256), "prompt_token_ids": [1, 2]}
    with pytest.raises(SteeringError, match="prompt_is_token_ids"):
        run(llm, [prompt], [params(capture=capture())])
    run(llm, [prompt], [params(1)])

# SPDX-License-Identifier: Apache-2.0
"""Readouts of the kinds ``lens`` and ``sae``, against the sampler, the reference model and the encoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import hf
from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.captures import result
from tests.engine.conftest import opened
from tests.engine.test_readouts import EDIT, PROBE, PROMPTS
from tests.tiny import save_autoencoder
from vllm_steer import SteeringError


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_autoencoder(tmp_path_factory.mktemp("sae"))


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, sae: Path) -> Iterator[Any]:
    with opened(tiny_llama, steering_config={"saes": {"tiny": str(sae)}, "record_columns": 32}) as engine:
        yield engine


K, TOKENS, LAST = 4, 8, 3
LENS = {"lens": {"top_k": K}, "point": "post_block", "layers": [1, LAST], "positions": "all"}
CAPTURE = {"memory": {"hooks": {"post_block": [1, LAST], "pre_attn": [2]}, "positions": "all"}}


def request(number: int) -> Any:
    """Return parameters; requests differ in readouts and captures, so that rows of all kinds share the arena."""
    readouts: dict[str, Any] = {"lens": LENS, "probe": {"probe": PROBE, "point": "post_block", "layer": 0}}
    if number % 3 == 2:
        readouts = {"lens": {**LENS, "positions": [[2, 9]]}}
    return params(
        TOKENS,
        logprobs=K,
        steering=EDIT,
        capture=CAPTURE if number % 2 else None,
        readouts=None if number == 3 else readouts,
    )


def test_last_layer_equals_the_sampler(llm: Any, tiny_llama: Path) -> None:
    """Catches values of another token, layer or request, another norm or unembedding, and disturbed captures."""
    outputs = run(llm, PROMPTS, [request(i) for i in range(len(PROMPTS))])
    model = hf.load(tiny_llama)
    for number, output in enumerate(outputs):
        readouts = output.outputs[0].readouts
        if number == 3:
            assert readouts is None
            continue
        found, prompt_len = readouts["lens"], len(output.prompt_token_ids)
        first, stop = (2, 9) if number % 3 == 2 else (0, prompt_len + TOKENS - 1)
        assert found.positions.tolist() == list(range(first, stop))
        assert found.token_ids.shape == found.logprobs.shape == (stop - first, 2, K)
        # The token at position p is sampled from the logits of p - 1.
        for position in range(max(prompt_len, first + 1), stop + 1):
            sampled = output.outputs[0].logprobs[position - prompt_len]
            place = position - 1 - first
            for token, value in zip(found.token_ids[place, 1], found.logprobs[place, 1], strict=True):
                assert value == pytest.approx(sampled[int(token)].logprob, abs=1e-3)
        if number % 2:
            rows = result(output).tensor("post_block", 1)[first:stop].float()
            with torch.inference_mode():
                logprobs = model.lm_head(model.model.norm(rows)).log_softmax(-1)
            expected = logprobs.gather(1, torch.from_numpy(found.token_ids[:, 0]).long())
            np.testing.assert_allclose(found.logprobs[:, 0], expected.numpy(), atol=1e-3)
            np.testing.assert_allclose(found.logprobs[:, 0, 0], logprobs.amax(1).numpy(), atol=1e-3)


def test_all_layers_and_given_tokens(llm: Any, tiny_llama: Path) -> None:
    """Catches layers that are left out, values of other tokens, or in another order, and a limit that counts a stop.

    The likeliest tokens of another request of the batch stay the likeliest.
    """
    wanted = [41, 7, 3, 90]
    given = {"lens": {"tokens": wanted}, "point": "post_block", "layers": "all", "positions": "all"}
    likeliest = {**given, "lens": {"top_k": K}}  # 2 x 4 numbers for each of 4 layers are the limit
    capture = {"memory": {"hooks": {"post_block": "all"}, "positions": "all"}}
    made = [
        params(TOKENS, logprobs=None, capture=capture, readouts={"lens": given if i % 2 else likeliest})
        for i in range(4)
    ]
    model = hf.load(tiny_llama)
    for number, output in enumerate(run(llm, PROMPTS[:4], made)):
        found = output.outputs[0].readouts["lens"]
        for layer in range(LAST + 1):
            rows = result(output).tensor("post_block", layer).float()
            with torch.inference_mode():
                logprobs = model.lm_head(model.model.norm(rows)).log_softmax(-1)
            if number % 2:
                assert (found.token_ids[:, layer] == wanted).all()
                expected = logprobs[:, wanted]
            else:
                expected = logprobs.topk(K).values
            np.testing.assert_allclose(found.logprobs[:, layer], expected.numpy(), atol=1e-3)


def test_features_equal_the_encoder(llm: Any, sae: Path) -> None:
    """Catches features of another token, request or site, and values at another column of the record."""
    readouts = {
        "lens": {**LENS, "lens": {"top_k": 2}},
        "topics": {"sae": "tiny", "top_k": 6, "point": "pre_attn", "layer": 2, "positions": "all"},
    }
    made = [
        params(TOKENS, logprobs=None, steering=EDIT, capture=CAPTURE, readouts=readouts if number % 2 else None)
        for number in range(len(PROMPTS))
    ]
    arrays = np.load(sae / "params.npz")
    for number, output in enumerate(run(llm, PROMPTS, made)):
        if number % 2:
            found = output.outputs[0].readouts["topics"]
            rows = result(output).tensor("pre_attn", 2).float().numpy()
            before = rows @ arrays["W_enc"] + arrays["b_enc"]
            expected = np.where(before > arrays["threshold"], np.maximum(before, 0), 0)
            assert found.indices.shape == found.values.shape == (len(rows), 6)
            np.testing.assert_allclose(found.values, -np.sort(-expected, axis=-1)[:, :6], rtol=1e-3, atol=1e-2)
            shown = np.take_along_axis(expected, np.maximum(found.indices, 0), -1)
            np.testing.assert_allclose(np.where(found.indices < 0, 0, shown), found.values, rtol=1e-3, atol=1e-2)


def test_lens_changes_no_token(llm: Any) -> None:
    """Catches a lens that edits the stream."""
    plain, read = params(TOKENS, logprobs=None), params(TOKENS, logprobs=None, readouts={"lens": LENS})
    assert [tokens_of(o) for o in run(llm, PROMPTS, [plain] * 6)] == [
        tokens_of(o) for o in run(llm, PROMPTS, [read] * 6)
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({**LENS, "layers": [1, 9]}, "readouts.lens.layer"),
        ({**LENS, "layers": [1, 1]}, "readouts.lens.layers"),
        ({**LENS, "lens": {"top_k": 0}}, "readouts.lens.lens.top_k"),
        ({**LENS, "lens": {"top_k": 16}}, "readouts"),
        ({**LENS, "lens": {"tokens": [1, 10**6]}}, "readouts.lens.lens.tokens"),
        ({**LENS, "top_k": 3}, "readouts.lens.top_k"),
        ({**LENS, "sigmoid": True}, "readouts.lens.sigmoid"),
        ({"sae": "tiny", "top_k": 51, "point": "post_block", "layer": 1}, "readouts.lens.top_k"),
        ({"sae": "gemma", "point": "post_block", "layer": 1}, "readouts.lens.sae"),
    ],
)
def test_refused(llm: Any, fields: dict[str, Any], field: str) -> None:
    """Catches a lens that the engine cannot compute, and an error at another field."""
    with pytest.raises(SteeringError) as refused:
        run(llm, [prompt(1, 2, 3)], [params(2, readouts={"lens": fields})])
    assert refused.value.field == field


def test_requests_that_begin_to_read_in_a_steady_batch(tiny_llama: Path) -> None:
    """Catches indices of an earlier step, in which another request of the same batch did not read yet."""
    with opened(tiny_llama, long_prefill_token_threshold=1, enable_prefix_caching=False) as engine:
        lens = {"lens": {"top_k": K}, "point": "post_block", "layer": LAST, "positions": "all_generated"}
        asked = params(TOKENS, readouts={"lens": lens, "probe": {"probe": PROBE, "point": "post_block", "layer": 0}})
        prompts = [prompt(*range(3, 3 + length)) for length in (5, 2, 8)]
        together = run(engine, prompts, [asked] * len(prompts))
        for given, output in zip(prompts, together, strict=True):
            (alone,) = run(engine, [given], [asked])
            assert tokens_of(output) == tokens_of(alone)
            for name, field in (("lens", "logprobs"), ("probe", "values")):
                got, expected = (getattr(each.outputs[0].readouts[name], field) for each in (output, alone))
                np.testing.assert_allclose(got, expected, atol=1e-4)

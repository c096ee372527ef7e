# SPDX-License-Identifier: Apache-2.0
"""Readouts of the kind ``lens``, against the sampler and against the reference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import hf
from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.captures import result
from tests.engine.test_readouts import EDIT, PROBE, PROMPTS
from vllm_steer import SteeringError

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
        ({**LENS, "top_k": 3}, "readouts.lens.top_k"),
        ({**LENS, "sigmoid": True}, "readouts.lens.sigmoid"),
        ({"sae": "gemma", "point": "post_block", "layer": 1}, "readouts.lens.sae"),
    ],
)
def test_refused(llm: Any, fields: dict[str, Any], field: str) -> None:
    """Catches a lens that the engine cannot compute, and an error at another field."""
    with pytest.raises(SteeringError) as refused:
        run(llm, [prompt(1, 2, 3)], [params(2, readouts={"lens": fields})])
    assert refused.value.field == field

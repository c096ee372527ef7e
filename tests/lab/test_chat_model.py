# SPDX-License-Identifier: Apache-2.0
"""The lab on a trained chat model: directions equal those of hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from demo.run import MODEL
from demo.texts import MOOD
from tests.engine.conftest import close
from tests.lab.hf import Hooked, cosine
from tests.tiny import make_llm
from vllm_steer.lab import make, read_examples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="the chat model is missing: run `make model`"),
]
EXAMPLES = read_examples([{"positive": plus, "negative": minus} for plus, minus in MOOD.pairs])


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    engine = make_llm(MODEL, max_model_len=256, max_num_seqs=64, skip_tokenizer_init=False, num_gpu_blocks_override=128)
    yield engine
    close(engine)


def test_directions_are_those_of_hooks(llm: Any) -> None:
    """Catches the first token in the means, whose stream is a hundred times longer, and another tokenisation."""
    hooked, tokenizer = Hooked(MODEL), llm.get_tokenizer()
    rows = np.stack([hooked.run(tokenizer.encode(text))[:, 1:].mean(1) for text in EXAMPLES.texts], axis=1)
    differences = (rows[:, 0::2] - rows[:, 1::2]).astype(np.float64)
    means, components = make(llm, EXAMPLES), make(llm, EXAMPLES, method="pca")
    for layer in range(len(rows)):
        mean = differences[layer].mean(0)
        assert cosine(means[layer].unit, mean) > 0.9999, layer
        vector = np.linalg.eigh(differences[layer].T @ differences[layer])[1][:, -1]
        assert cosine(components[layer].unit, vector * np.sign(vector @ mean)) > 0.9999, layer
    assert means[12].auroc > 0.9 and 1 < means[12].stream < 200

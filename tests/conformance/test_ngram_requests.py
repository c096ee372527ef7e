# SPDX-License-Identifier: Apache-2.0
"""Edits and captures of a model with Engram layers, whose tokens read the ids of earlier ones, under a full scheduler.

Prompts are split, prefixes are cached and shared, and requests are preempted. Each request must return what it returns
in an engine that runs it alone and as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.conformance import ngrams, two_ranks
from tests.conformance.hf_reference import Array
from tests.conformance.model import HIDDEN, VOCAB
from tests.conformance.shard import selected
from tests.engine.conftest import close
from tests.engine.crowded import crowded_engine
from tests.tiny import direction, make_llm

ROW: Final = "deepseek_v41_engram"
NEW_TOKENS: Final = 40
MAX_TOKENS: Final = 128
SHARED: Final = tuple((7 * number) % VOCAB for number in range(3, 39))
"""Beginning of most prompts, longer than a cache block."""
SITES: Final = (("post_block", 0), ("pre_attn", 1), ("pre_attn", 3), ("post_block", 2), ("post_attn", 1))
"""In front of and behind the memory of an Engram layer."""
TOLERANCE: Final = 1e-3

pytestmark = pytest.mark.skipif(not selected(ROW), reason="belongs to another part of the architectures")


@dataclass(frozen=True)
class Found:
    """The tokens, the rows behind both memories, and the number of tokens that came from the prefix cache."""

    tokens: tuple[int, ...]
    rows: Array
    cached: int

    def differs(self, other: Found) -> bool:
        if self.tokens != other.tokens:
            return True
        far = np.linalg.norm(self.rows - other.rows, axis=-1) / np.linalg.norm(other.rows, axis=-1)
        return not float(far.max()) < TOLERANCE


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts and parameters: plain requests, and edits from some position on, which end shared prefixes."""
    found = []
    for number in range(10):
        end = [(number * 11 + step) % VOCAB for step in range(3 + number)]
        prompt = [*SHARED[: 36 - 3 * (number % 2)], *end]
        steering: dict[str, Any] = {}
        if number % 5:
            point, layer = SITES[number % len(SITES)]
            start = (0, 32, 37, -1)[number % 4]
            edit = {"kind": "add", "point": point, "layers": layer, "vector": direction(number, 3.0, HIDDEN)}
            steering = {"steering": [{**edit, "tokens": [[start, None]] if start >= 0 else "generated"}]}
        found.append((prompt, steering))
    return found


def run(llm: Any, wanted: Sequence[tuple[list[int], dict[str, Any]]]) -> list[Found]:
    """Run requests together."""
    from vllm_steer import SamplingParams

    capture = {"memory": {"hooks": {"pre_attn": [1, 3]}, "positions": "all_generated"}}
    common: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in wanted],
        [SamplingParams(**common, **steering, capture=capture) for _, steering in wanted],
        use_tqdm=False,
    )
    found = []
    for output in outputs:
        result = output.outputs[0].capture_results["memory"]
        rows = [result.tensor("pre_attn", layer).float().numpy() for layer in (1, 3)]
        found.append(Found(tuple(output.outputs[0].token_ids), np.stack(rows), output.num_cached_tokens))
    return found


@contextmanager
def model(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    torch.set_num_threads(1)
    with two_ranks.prepare(ROW):
        tiny = two_ranks.row(ROW)
        tiny = replace(tiny, settings={**tiny.settings, "max_position_embeddings": MAX_TOKENS})
        path, settings = two_ranks.save(tiny, folder)
        yield path, {**settings, "max_model_len": MAX_TOKENS}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Return the answers of an engine that runs each request alone, without a prefix cache."""
    with model(tmp_path_factory.mktemp("alone")) as (path, settings):
        llm = make_llm(path, **settings, enable_prefix_caching=False)
        try:
            return [run(llm, [request])[0] for request in requests()]
        finally:
            close(llm)


@pytest.mark.parametrize("forgets", [False, True])
def test_answers_as_alone(forgets: bool, alone: list[Found], tmp_path: Path) -> None:
    """Catches edits and rows of tokens whose n-grams a split prompt, a cached prefix or a preemption has changed.

    Control: a memory that forgets the tokens of earlier steps is found.
    """
    replaced = {"_write_hash_cache_kernel": lambda *args: None} if forgets else {}
    with patch.dict(ngrams.KERNELS, replaced), model(tmp_path) as (path, settings):
        full = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 12, "block_size": 32, "max_num_seqs": 10}
        with crowded_engine(path, **settings, **full, enable_prefix_caching=True) as (llm, preempted):
            rounds = [run(llm, requests()) for _ in range(2)]
    assert preempted
    assert sum(each.cached > 0 for each in rounds[1]) > 3
    wrong = [number for found in rounds for number, (one, two) in enumerate(zip(found, alone, strict=True))
             if one.differs(two)]  # fmt: skip
    assert bool(wrong) == forgets, wrong

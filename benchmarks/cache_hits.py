# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache hit rates of steered requests with a common prefix of 1,500 tokens.

    python benchmarks/cache_hits.py --out benchmarks/results/cache-hits.json

Sixteen requests run one after the other on a small random Llama with blocks of 32 tokens. Their prompts share 1,500
tokens and end with 20 tokens of their own. The rate counts the prompt tokens of all requests except the first. The
figures depend neither on speed nor on the model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm_steer.testing.fuzz.model import prepare_environment, save_tiny_llama

REQUESTS, PREFIX, OWN, BLOCK, VOCAB, HIDDEN = 16, 1500, 20, 32, 128, 64


def _site(seed: int) -> dict[str, Any]:
    return {"pre_attn": {1: np.random.default_rng(seed).standard_normal(HIDDEN).astype("f4")}}


CASES: Mapping[str, Callable[[int], dict[str, Any]]] = MappingProxyType(
    {
        "unsteered": lambda i: {},
        "the same steering of every token": lambda i: {"steering_vectors": _site(1000)},
        "steering of generated tokens, another for each request": lambda i: {"decode_steering_vectors": _site(i)},
        "steering of the request's own 20 tokens, another for each request": lambda i: {
            "steering": [
                {"kind": "add", "point": "pre_attn", "layers": 1, "vector": _site(i)["pre_attn"][1],
                 "tokens": [[-OWN, None]]}
            ]
        },
        "steering of every token, another for each request": lambda i: {"steering_vectors": _site(i)},
        "reading the last prompt token": lambda i: {"capture": _capture("last_prompt")},
        "reading every prompt token": lambda i: {"capture": _capture("all_prompt")},
    }
)  # fmt: skip


def _capture(positions: str) -> dict[str, Any]:
    return {"memory": {"hooks": {"post_block": [1]}, "positions": positions}}


def measure(llm: Any, number: int, fields: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Return prompt tokens, cached tokens and hit rate of all requests except the first."""
    from vllm_steer import SamplingParams

    rng = np.random.default_rng(number)
    prefix = rng.integers(1, VOCAB, PREFIX).tolist()
    prompt_tokens = cached = 0
    for i in range(REQUESTS):
        prompt = {"prompt_token_ids": [*prefix, *rng.integers(1, VOCAB, OWN).tolist()]}
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False, **fields(i))
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        if i:
            prompt_tokens += len(prompt["prompt_token_ids"])
            cached += output.num_cached_tokens or 0
    return {"prompt_tokens": prompt_tokens, "cached_tokens": cached, "hit_rate": round(cached / prompt_tokens, 4)}


@contextmanager
def small_engine() -> Iterator[Any]:
    """Return an engine on a small random Llama with blocks of ``BLOCK`` tokens."""
    prepare_environment()
    from vllm_steer import LLM

    with tempfile.TemporaryDirectory() as folder:
        yield LLM(
            model=str(save_tiny_llama(Path(folder))), enable_steering=True, enforce_eager=True, dtype="float32",
            max_model_len=2048, block_size=BLOCK, skip_tokenizer_init=True, disable_log_stats=True, seed=0,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with small_engine() as llm:
        rows = [{"case": name, **measure(llm, number, fields)} for number, (name, fields) in enumerate(CASES.items())]
    setup = {"requests": REQUESTS, "shared_prefix": PREFIX, "own_tokens": OWN, "block_size": BLOCK}
    out.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()

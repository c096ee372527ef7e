# SPDX-License-Identifier: Apache-2.0
"""Helpers that run requests and return their output in a comparable form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.tiny import VOCAB
from vllm_steer import SamplingParams


def params(max_tokens: int = 6, **fields: Any) -> Any:
    """Return greedy parameters with log-probabilities of the whole vocabulary that never stop early."""
    settings: dict[str, Any] = dict(  # noqa: C408
        max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=VOCAB
    )
    return SamplingParams(**{**settings, **fields})


def prompt(*tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(tokens)}


def tokens_of(output: Any, sample: int = 0) -> list[int]:
    return list(output.outputs[sample].token_ids)


def logprobs_of(output: Any, sample: int = 0) -> np.ndarray:
    """Return log-probabilities ``[generated, vocabulary]``."""
    steps = output.outputs[sample].logprobs
    return np.array([[step[token].logprob for token in range(VOCAB)] for step in steps])


def chosen_logprobs(output: Any) -> np.ndarray:
    """Return the log-probabilities ``[generated]`` of the chosen tokens."""
    first = output.outputs[0]
    return np.array([step[token].logprob for token, step in zip(first.token_ids, first.logprobs, strict=True)])


def finish(engine: Any) -> dict[str, Any]:
    """Run the requests of vLLM's engine to their end and return the outputs of those that finish, by id."""
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step() if output.finished})
    return outputs


def run(llm: Any, prompts: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    outputs: list[Any] = llm.generate(list(prompts), list(wanted), use_tqdm=False)
    return outputs

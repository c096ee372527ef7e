# SPDX-License-Identifier: Apache-2.0
"""Rows of sampled tokens, for training on what the model itself writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vllm_steer.capture.hidden_states import as_prompts, none_left_running
from vllm_steer.errors import SteeringError
from vllm_steer.lab.text_rows import read_layer, read_site_layers
from vllm_steer.patching.offline import OfflineRunner


class Rollouts(NamedTuple):
    """Sampled tokens, one after another: by prompt, sample and position. Entry ``i`` of all fields is one token."""

    rows: torch.Tensor
    """``[tokens, hidden]`` on the CPU."""
    token_ids: torch.Tensor
    """int64 ``[tokens]``."""
    logprobs: torch.Tensor
    """Log-probability with which each token was sampled, float32 ``[tokens]``; see vLLM's ``logprobs_mode``."""
    positions: torch.Tensor
    """Position of each token in prompt and output together, int64 ``[tokens]``."""
    prompts: torch.Tensor
    """Number of each token's prompt, int64 ``[tokens]``, for instance to attach rewards."""
    samples: torch.Tensor
    """Number of each token's sample of its prompt, int64 ``[tokens]``."""

    def __repr__(self) -> str:
        return f"Rollouts({len(self.rows)} tokens, rows {tuple(self.rows.shape)} {self.rows.dtype})"

    def take(self, order: slice | torch.Tensor) -> Rollouts:
        """Return some of the tokens."""
        return Rollouts(*(each[order] for each in self))


def rollouts(
    llm: Any,
    prompts: Any,
    *,
    layer: int,
    point: str = "post_block",
    before: bool = False,
    dtype: str | None = None,
    **sampling: Any,
) -> Rollouts:
    """Sample from the model, and return the sampled tokens with their rows at one site, from the same run.

    Args:
        llm: An `LLM` with steering, in this process.
        prompts: Prompts in any form that ``llm.generate`` accepts, or conversations as in ``llm.chat``.
        layer: One layer.
        point: Hook point.
        before: Whether a token's row is the one from which it was sampled, at the position before it, such as a
            value function reads. By default, it is the row of the token itself. The model never runs the last token
            of a sample, so it has no such row and is left out, unless a readout ended the sample.
        dtype: Dtype of the rows; the model's by default.
        **sampling: Other arguments of `SamplingParams`, such as ``n``, ``max_tokens``, ``temperature`` and
            ``steering``.

    Raises:
        SteeringError: The engine refuses the layer, the hook point or the steering, ``prompts`` or a prompt is
            empty, or a prompt is too long.
        TypeError: `SamplingParams` has no such argument.
        RuntimeError: Rows are missing.

    Examples:
        >>> found = rollouts(llm, chats, layer=12, n=8, max_tokens=64)  # doctest: +SKIP
        >>> advantage = reward[found.prompts, found.samples] - value(found.rows)  # doctest: +SKIP
    """
    from vllm_steer.params import SamplingParams

    if taken := {"capture", "logprobs"} & sampling.keys():
        raise SteeringError(min(taken), "is set by rollouts; leave it out, or capture with llm.generate")
    _, name, layers = read_site_layers(llm, point, read_layer(layer))
    spec = {"hooks": {name: list(layers)}, "positions": [[-1, None]]} | ({"dtype": dtype} if dtype else {})
    params = SamplingParams(**sampling, logprobs=0, capture={"memory": spec})
    several, chats = as_prompts(prompts)
    if not several:
        raise SteeringError("prompts", "is empty; give at least one prompt")
    _check_lengths(llm, several)
    with none_left_running(llm):
        outputs = (llm.chat if chats else llm.generate)(several, params, use_tqdm=False)
    found = [
        _read(number, output, sample, before)
        for number, output in enumerate(outputs)
        for sample in sorted(output.outputs, key=lambda each: each.index)
    ]
    return Rollouts(*map(torch.cat, zip(*found, strict=True)))


def _check_lengths(llm: Any, prompts: Sequence[Any]) -> None:
    """Raise SteeringError for a prompt that is empty, or has no room for a sampled token. Images do not count."""
    runner = OfflineRunner(llm)
    facts, tokenizer = runner.facts, runner.tokenizer
    for number, prompt in enumerate(prompts):
        tokens = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        chat = isinstance(tokens, (list, tuple)) and bool(tokens) and isinstance(tokens[0], Mapping)
        if chat and tokenizer is not None and all(isinstance(each.get("content"), str) for each in tokens):
            tokens = tokenizer.apply_chat_template(tokens, add_generation_prompt=True, return_dict=False)
        elif isinstance(tokens, str) and tokenizer is not None:
            tokens = runner.encode(tokens, True)
        elif chat or not isinstance(tokens, (list, tuple)):
            continue
        if not tokens:
            raise SteeringError(f"prompts[{number}]", "is empty; give at least one token, or remove it")
        if facts.max_model_len is not None and len(tokens) >= facts.max_model_len:
            problem = f"has {len(tokens)} tokens, and {facts.model} reads at most {facts.max_model_len - 1} here"
            raise SteeringError(f"prompts[{number}]", f"{problem}; shorten it, or raise max_model_len")


def _read(number: int, output: Any, sample: Any, before: bool) -> Rollouts:
    """Return the tokens of a sample that have rows."""
    result = sample.capture_results["memory"]
    if result.status != "ok":
        raise RuntimeError(f"prompts[{number}], sample {sample.index}: {result.error}")
    ((_, site),) = result.sites.items()
    ids, first = list(sample.token_ids), len(output.prompt_token_ids)
    row_of = {position: i for i, position in enumerate(site.positions.tolist())}
    wanted = [i for i in range(len(ids)) if first + i - before in row_of]
    entries = [(ids[i], first + i, number, sample.index) for i in wanted]
    tokens, positions, prompts, samples = torch.tensor(entries, dtype=torch.int64).reshape(-1, 4).unbind(1)
    return Rollouts(
        rows=site.rows[[row_of[first + i - before] for i in wanted]],
        token_ids=tokens,
        logprobs=torch.tensor([sample.logprobs[i][ids[i]].logprob for i in wanted], dtype=torch.float32),
        positions=positions,
        prompts=prompts,
        samples=samples,
    )

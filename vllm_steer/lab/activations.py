# SPDX-License-Identifier: Apache-2.0
"""Captured rows of texts: one row per text at each layer, and the length of the stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vllm_steer.capture.hidden_states import capture_hidden_states
from vllm_steer.errors import SteeringError
from vllm_steer.lab.examples import Text
from vllm_steer.patching.offline import OfflineRunner
from vllm_steer.patching.runner import ModelFacts
from vllm_steer.points import PointName
from vllm_steer.registry.directions import WITHOUT_FIRST, Array
from vllm_steer.request.scalars import read_choice
from vllm_steer.request.sites import read_layers, read_point
from vllm_steer.request.strict_json import parse_json

Pool = Literal["mean", "last"]
POOLS: tuple[Pool, ...] = ("mean", "last")
_BATCH = 32
"""Texts whose rows are in memory together."""


def describe_tokens(positions: Any, pool: Pool) -> dict[str, str]:
    """Return the entries of a file's provenance for the tokens of a text and how their rows are pooled."""
    return {"positions": positions if isinstance(positions, str) else json.dumps(positions, default=str), "pool": pool}


def described_tokens(provenance: Mapping[str, str]) -> tuple[Any, Pool]:
    """Return the positions and the pool of a file's provenance, or the defaults."""
    where: Any = provenance.get("positions") or WITHOUT_FIRST
    if isinstance(where, str) and where.startswith("["):
        where = parse_json(where, "provenance.positions")
    return where, "last" if provenance.get("pool") == "last" else "mean"


@dataclass(frozen=True, eq=False)
class Activations:
    """Rows of texts at a hook point, by layer."""

    model: str
    point: PointName
    rows: Mapping[int, Array]
    """``[texts, hidden]`` by layer."""
    streams: Mapping[int, float]
    """Median length of the captured rows of all tokens, by layer."""
    longest: int
    """Tokens of the longest text."""


def read_site_layers(llm: Any, point: str, layers: Any) -> tuple[ModelFacts, PointName, tuple[int, ...]]:
    """Return facts about the model, the hook point and its layers; raise SteeringError if the model lacks one."""
    facts = OfflineRunner(llm).facts
    name = read_point(point, "point")
    if name not in facts.points:
        raise SteeringError("point", f"{name} is not read by this engine; use one of {', '.join(facts.points)}")
    read = read_layers(layers, "layers")
    numbers = tuple(range(facts.num_layers)) if read == "all" else read
    if numbers[-1] >= facts.num_layers:
        problem = f"{numbers[-1]} is not a layer of {facts.model}, which has layers 0 to {facts.num_layers - 1}"
        raise SteeringError("layers", f"{problem}; name other layers, or start the model that they are of")
    return facts, name, numbers


def collect(
    llm: Any,
    texts: Sequence[Text],
    *,
    point: str = "post_block",
    layers: Any = "all",
    positions: Any = WITHOUT_FIRST,
    pool: Pool = "mean",
    answer: bool = False,
    use_tqdm: bool = False,
) -> Activations:
    """Run texts through a model and return one row per text and layer.

    Args:
        llm: An `LLM` with steering.
        texts: Strings, token ids or conversations.
        point: Hook point.
        layers: Layers, or ``"all"``.
        positions: Tokens of each text, as in a capture spec: all but the first by default.
        pool: Mean of the tokens' rows, or the last row.
        answer: Whether conversations end with the tokens that begin an answer.
        use_tqdm: Whether to show progress bars.

    Raises:
        SteeringError: The model has no such layer or hook point, or a text has no tokens at the positions.
    """
    read_choice(pool, POOLS, "pool")
    facts, name, numbers = read_site_layers(llm, point, layers)
    if not isinstance(positions, str):
        positions = [list(each) if isinstance(each, tuple) else each for each in positions]
    spec: dict[str, Any] = {"hooks": {name: list(numbers)}, "positions": positions, "dtype": "float32"}
    pooled: dict[int, list[Array]] = {layer: [] for layer in numbers}
    lengths: dict[int, list[Array]] = {layer: [] for layer in numbers}
    longest = 0
    for start in range(0, len(texts), _BATCH):
        batch = list(texts[start : start + _BATCH])
        try:
            chat = {"add_generation_prompt": answer} if isinstance(batch[0][0], dict) else None
            states = capture_hidden_states(llm, batch, **spec, chat_kwargs=chat, use_tqdm=use_tqdm)
        except (RuntimeError, SteeringError) as error:  # such as a text without a token at the positions
            raise SteeringError("texts", f"of the batch from text {start} on: {error}") from None
        longest = max(longest, *(len(request.prompt_token_ids) for request in states))
        for layer in numbers:
            for tensor in states.tensors(name, layer):
                array = tensor.numpy()
                pooled[layer].append(array[-1] if pool == "last" else array.mean(0))
                lengths[layer].append(np.linalg.norm(array, axis=1))
    rows = {layer: np.stack(each) for layer, each in pooled.items()}
    streams = {layer: float(np.median(np.concatenate(each))) for layer, each in lengths.items()}
    return Activations(facts.model, name, rows, streams, longest)

# SPDX-License-Identifier: Apache-2.0
"""Scores of generated texts, and what they cost: perplexity under the model without steering, and repetition."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.params import SamplingParams
from vllm_steer.request.scalars import shown

_WORD = re.compile(r"[^\W\d_]+")
_PROBE = "score"
_SCORES = "must be Keywords, ProbeScore or a function of prompt and text"
_PROBE_HINT = "a probe scores with ProbeScore(readout), such as ProbeScore(trained.readout())"


@dataclass(frozen=True)
class Keywords:
    """Positive minus negative words per hundred words of a text, in any case."""

    positive: frozenset[str]
    negative: frozenset[str] = frozenset()

    def __init__(self, positive: Sequence[str], negative: Sequence[str] = ()) -> None:
        """Take the words; raise SteeringError if there are none, or an entry is not one word."""
        for name, words in (("positive", positive), ("negative", negative)):
            lower = [word.lower() for word in ([words] if isinstance(words, str) else words)]
            if wrong := [word for word in lower if not _WORD.fullmatch(word)]:
                raise SteeringError(f"score.{name}", f"{wrong[0]!r} is not one word of letters; remove or split it")
            object.__setattr__(self, name, frozenset(lower))
        if not self.positive:
            raise SteeringError("score.positive", "is empty; give at least one word")

    def __call__(self, prompt: str, text: str) -> float:
        """Return the score of a text."""
        words = _WORD.findall(text.lower())
        return 100 * sum((word in self.positive) - (word in self.negative) for word in words) / max(1, len(words))


@dataclass(frozen=True)
class ProbeScore:
    """Mean of a probe over the tokens of a text, which the model reads again without steering.

    Read during the steered run, a probe at or after the steered site sees the added vector itself.
    """

    readout: dict[str, Any] = field(hash=False)
    """A probe as in `SamplingParams.readouts`, such as ``direction.probe()`` or ``{"probe": "module/probe"}``."""
    model: str | None = None
    """The model that the probe was trained on; `dose` refuses another one."""

    def __post_init__(self) -> None:
        """Raise SteeringError unless the readout is a probe."""
        if not isinstance(self.readout, Mapping) or "probe" not in self.readout:
            raise SteeringError("score", f"must have a probe, not {shown(self.readout)}; {_PROBE_HINT}")
        SamplingParams(readouts={_PROBE: self.readout})


Score: TypeAlias = "Callable[[str, str], float] | ProbeScore"
"""A function of prompt and text, or a probe."""


def _content(probe: Any) -> bytes:
    """Return the bytes of a probe's weights, of its hidden layer, or of its name in a module."""
    if isinstance(probe, str):
        return probe.encode()
    if isinstance(probe, Mapping):
        return b"".join(key.encode() + _content(value) for key, value in sorted(probe.items()))
    return np.asarray(probe, np.float32).tobytes()


def score_name(score: Score) -> str:
    """Return a name by which results of another score are recognised; of a function, its name and not its code."""
    if isinstance(score, ProbeScore):
        probe = {key: value for key, value in score.readout.items() if key != "probe"}
        weights = _content(score.readout["probe"])
        return f"probe {hashlib.sha256(weights + repr(sorted(probe.items())).encode()).hexdigest()[:16]}"
    if isinstance(score, Keywords):
        words = repr([sorted(score.positive), sorted(score.negative)]).encode()
        return f"keywords {hashlib.sha256(words).hexdigest()[:16]}"
    if not callable(score):
        raise SteeringError("score", f"{_SCORES}, not {type(score).__name__}; {_PROBE_HINT}")
    return f"function {getattr(score, '__module__', '')}.{getattr(score, '__qualname__', type(score).__name__)}"


@dataclass(frozen=True)
class Reading:
    """A generated text, as the model reads it without steering."""

    losses: tuple[float, ...]
    """Negative log-probability of each token, in nats."""
    probe: float = float("nan")
    """Mean of the probe, if one was given."""


def read_again(llm: Any, outputs: Sequence[Any], probe: ProbeScore | None = None) -> list[Reading]:
    """Read the generated texts of outputs again without steering, in one batch.

    Args:
        llm: An `LLM` with steering.
        outputs: vLLM's outputs, of which the first sample is read.
        probe: A probe to read at the tokens of the texts.
    """
    prompts = [{"prompt_token_ids": [*each.prompt_token_ids, *each.outputs[0].token_ids]} for each in outputs]
    params, found = [], []
    for each in outputs:
        given: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        if probe is not None and each.outputs[0].token_ids:
            given["readouts"] = {_PROBE: {**probe.readout, "positions": [[len(each.prompt_token_ids), None]]}}
        params.append(SamplingParams(**given))
    for read, output in zip(llm.generate(prompts, params, use_tqdm=False), outputs, strict=True):
        start = len(output.prompt_token_ids)
        written = list(zip(read.prompt_token_ids, read.prompt_logprobs, strict=True))[start:]
        losses = tuple(-by_token[token].logprob for token, by_token in written)
        value = float("nan")
        if probe is not None and losses:
            value = float(read.outputs[0].readouts[_PROBE].values[: len(losses)].mean())
        found.append(Reading(losses, value))
    return found


def perplexity(readings: Sequence[Reading]) -> float:
    """Return the perplexity of all tokens of several texts; NaN if there are none."""
    losses = [loss for each in readings for loss in each.losses]
    return float(np.exp(np.mean(losses))) if losses else float("nan")


def repetition(tokens: Sequence[int], size: int = 3) -> float:
    """Return the share of runs of ``size`` tokens that have occurred before in the text."""
    runs = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0

# SPDX-License-Identifier: Apache-2.0
"""Token-by-token reference of readouts, gates, stops and live strengths in HF Transformers, without a cache.

The sequence is run through the whole model for every token. Decisions about a token are made once, when it is first
computed, by the written rules of ``docs/design/dynamic.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from vllm_steer import Selector

Live = Callable[[int], Mapping[str, float]]


@dataclass
class Expected:
    """What the reference generated and decided."""

    tokens: list[int]
    scores: dict[str, np.ndarray]
    """Value of each readout at every forwarded position."""
    factors: np.ndarray
    """``[positions, gated edits]``."""
    stop: tuple[str, int] | None
    """Readout and position of the stop that fired."""
    margins: list[float] = field(default_factory=list)
    """Distance of every score that was compared with a bound from it."""


class Reference:
    """A model of HF Transformers with edits that react to readouts and to generated tokens.

    Args:
        model: A causal language model whose decoder layers take and return the stream.
        layers: Its decoder layers.
        parts: Start and end token of named parts of the output.
    """

    def __init__(self, model: Any, layers: Sequence[Any], parts: Mapping[str, Sequence[int]] | None = None) -> None:
        self._model, self._layers, self._parts = model, layers, parts or {}

    def run(
        self,
        prompt: Sequence[int],
        generated: int,
        readouts: Mapping[str, Any],
        edits: Sequence[Any] = (),
        stops: Sequence[Any] = (),
        live: Live = lambda position: {},
        bias: Mapping[int, float] | None = None,
    ) -> Expected:
        """Generate greedily.

        Args:
            prompt: Prompt tokens.
            generated: Most tokens to generate.
            readouts: As in a request, probes by value.
            edits: ``Edit`` objects of the kinds ``add`` and ``ablate``.
            stops: As in a request.
            live: Returns the live strengths at a position.
            bias: Numbers added to the logits of tokens.
        """
        tokens, prompt_len = list(prompt), len(prompt)
        scores: dict[str, list[float]] = {name: [] for name in readouts}
        factors: list[list[float]] = []
        expected = Expected([], {}, np.empty(0), None)
        runs = [0] * len(stops)
        while True:
            first = len(factors)
            gated = [self._early_factors(e, tokens, prompt_len, scores, factors, expected) for e in edits]
            found, late = self._forward(tokens, readouts, edits, gated, live, first, expected)
            for position in range(first, len(tokens)):
                for name in readouts:
                    scores[name].append(float(found[name][position]))
                factors.append([float(column[position]) for column in late])
            position = len(tokens) - 1
            if position >= prompt_len:
                for number, stop in enumerate(stops):
                    if "positions" in stop and not self._is_in(stop["positions"], tokens, prompt_len, position):
                        continue
                    runs[number] = runs[number] + 1 if _holds(stop, scores[stop["readout"]][position], expected) else 0
                    if runs[number] >= stop.get("tokens", 1):
                        expected.stop = (stop["readout"], position)
                        break
            if expected.stop or len(tokens) - prompt_len == generated:
                break
            logits = self._logits[-1].clone()
            for token, added in (bias or {}).items():
                logits[token] += added
            tokens.append(int(logits.argmax()))
            if len(tokens) - prompt_len == generated:
                break
        expected.tokens = tokens[prompt_len:]
        expected.scores = {name: np.array(values) for name, values in scores.items()}
        chosen = [i for i, e in enumerate(edits) if e.when or e.tokens.spans]
        expected.factors = np.array(factors)[:, chosen]
        for place, number in enumerate(chosen):
            covered = np.zeros(len(factors), dtype=bool)
            for start, end in edits[number].tokens.intervals(prompt_len):
                covered[start:end] = True
            expected.factors[~covered, place] = 0.0
        return expected

    def _early_factors(
        self, edit: Any, tokens: list[int], prompt_len: int, scores: Any, factors: Any, expected: Expected
    ) -> torch.Tensor:
        """Return the factor at every position from conditions on earlier tokens."""
        factor = torch.ones(len(tokens))
        for condition in edit.when:
            if condition.window == "token":
                continue
            values = scores[condition.readout]
            for position in range(len(factors), len(tokens)):
                if position < prompt_len:
                    continue
                if condition.positions is not None and condition.positions.spans:
                    seen = [
                        values[p] for p in range(prompt_len, position)
                        if self._is_in(condition.positions, tokens, prompt_len, p)
                    ]  # fmt: skip
                    factor[position] *= _early(condition, seen, len(seen), 1, expected) if seen else 0.0
                else:
                    factor[position] *= _early(condition, values, position, prompt_len, expected)
        for position in range(max(len(factors), prompt_len), len(tokens)):
            factor[position] *= self._is_in(edit.tokens, tokens, prompt_len, position)
        return factor

    def _is_in(self, selector: Any, tokens: list[int], prompt_len: int, position: int) -> bool:
        """Return whether a generated token is in the part of the output that a selector names."""
        for span in Selector.parse(selector).spans:
            if span.name and span.name not in self._parts:
                continue
            start, end = self._parts[span.name] if span.name else (span.start, span.end)
            # The start of a tool call ends the thinking and does not belong to it.
            breaks = [self._parts["tool_call"][0]] if span.name == "thinking" and "tool_call" in self._parts else []
            inside = span.opened
            for token in tokens[:position]:
                inside = (inside or token == start) and token not in (end, *breaks)
            token = tokens[position]
            if (token == start or (inside and token not in breaks)) == span.outside:
                return False
        return True

    def _forward(
        self, tokens: list[int], readouts: Any, edits: Any, gated: Any, live: Live, first: int, expected: Expected
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        prompt_len = self._prompt_len(first, tokens)
        found: dict[str, torch.Tensor] = {}
        used: list[torch.Tensor] = [torch.ones(len(tokens)) for _ in edits]

        def at_site(point: str, layer: int, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            for number, edit in enumerate(edits):
                if edit.point != point or not (edit.layers == "all" or layer in edit.layers):
                    continue
                factor = self._history[number][: len(tokens)].clone()
                fresh = gated[number].clone()
                for condition in edit.when:
                    if condition.window == "token":
                        fresh = fresh * torch.tensor(
                            [_factor(condition, float(v), expected) for v in found[condition.readout]]
                        )
                factor = torch.cat([factor[:first], fresh[first:]])
                used[number] = factor
                strength = torch.tensor([live(i).get(edit.live, 1.0) if edit.live else 1.0 for i in range(len(tokens))])
                strength = strength * factor * edit.strength
                covered = torch.zeros(len(tokens))
                for start, stop in edit.tokens.intervals(prompt_len):
                    covered[start:stop] = 1.0
                v = torch.from_numpy(edit.vector.copy())
                scale = (strength * covered).unsqueeze(1)
                if edit.kind == "add":
                    x = x + scale * v
                else:
                    u = v / v.norm()
                    x = x - scale * (x @ u).unsqueeze(1) * u
            for name, each in readouts.items():
                if each["point"] == point and each["layer"] == layer:
                    value = _probe(x, each["probe"]) + each.get("bias", 0.0)
                    found[name] = torch.sigmoid(value) if each.get("sigmoid") else value
            return x

        handles = []
        for number, layer in enumerate(self._layers):
            handles += [
                layer.register_forward_pre_hook(_before(at_site, number), with_kwargs=True),
                layer.register_forward_hook(_after(at_site, number)),
            ]
        with torch.inference_mode():
            self._logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        if not first:
            self._history = [torch.ones(0) for _ in edits]
        self._history = [torch.cat([old[:first], new[first:]]) for old, new in zip(self._history, used, strict=True)]
        return found, self._history

    def _prompt_len(self, first: int, tokens: list[int]) -> int:
        if not first:
            self._length = len(tokens)
            self._history = [torch.ones(len(tokens))] * 64
        return self._length


def _probe(x: torch.Tensor, probe: Any) -> torch.Tensor:
    """Return the product with a vector, or the output of a hidden layer."""
    if not isinstance(probe, Mapping):
        return x @ torch.as_tensor(probe)
    activation = {"relu": torch.relu, "tanh": torch.tanh, "gelu": functional.gelu, "silu": functional.silu}
    weights, outputs = (torch.as_tensor(probe[name]) for name in ("weights", "outputs"))
    before = x @ weights.T + torch.as_tensor(probe.get("biases", np.zeros(len(outputs), dtype="f4")))
    return activation[probe.get("activation", "relu")](before) @ outputs


def _before(at_site: Any, layer: int) -> Any:
    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (at_site("pre_attn", layer, args[0][0]).unsqueeze(0), *args[1:]), kwargs
        stream = at_site("pre_attn", layer, kwargs["hidden_states"][0]).unsqueeze(0)
        return args, {**kwargs, "hidden_states": stream}

    return hook


def _after(at_site: Any, layer: int) -> Any:
    def hook(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (at_site("post_block", layer, output[0][0]).unsqueeze(0), *output[1:])
        return at_site("post_block", layer, output[0]).unsqueeze(0)

    return hook


def _distance(bound: Any, value: float) -> float:
    return value - bound.above if bound.above is not None else bound.below - value


def _factor(condition: Any, value: float, expected: Expected) -> float:
    distance = _distance(condition.bound, value)
    if condition.sharpness:
        return float(1 / (1 + np.exp(-condition.sharpness * distance)))
    expected.margins.append(abs(distance))
    return float(distance > 0)


def _holds(stop: Mapping[str, Any], value: float, expected: Expected) -> bool:
    distance = value - stop["above"] if "above" in stop else stop["below"] - value
    expected.margins.append(abs(distance))
    return distance > 0


def _early(condition: Any, values: list[float], position: int, prompt_len: int, expected: Expected) -> float:
    """Return the factor of a condition on tokens before ``position``."""
    if condition.window == "previous" and condition.tokens:
        recent = values[max(prompt_len - 1, position - condition.tokens) : position]
        held = [_factor(condition, value, expected) for value in recent]
        return float(len(held) == condition.tokens and all(held))
    if condition.window == "previous" and condition.over in ("mean", "max"):
        fold = np.mean if condition.over == "mean" else np.max
        return _factor(condition, float(fold(values[prompt_len - 1 : position])), expected)
    if condition.window == "previous" and condition.over == "ema":
        average = values[prompt_len - 1]
        for value in values[prompt_len:position]:
            average += condition.alpha * (value - average)
        return _factor(condition, average, expected)
    if condition.window == "previous":
        return _factor(condition, values[position - 1], expected)
    if condition.window == "latch":
        on = 0.0
        for value in values[prompt_len - 1 : position]:
            if _factor(condition, value, expected):
                on = 1.0
            elif condition.release is not None:
                distance = _distance(condition.release, value)
                expected.margins.append(abs(distance))
                on = 0.0 if distance > 0 else on
        return on
    intervals = ((0, prompt_len),) if condition.positions is None else condition.positions.intervals(prompt_len)
    ((start, stop),) = intervals
    covered = values[start:stop]
    folded = {"mean": np.mean, "max": np.max, "last": lambda each: each[-1]}[condition.over or "mean"](covered)
    return _factor(condition, float(folded), expected)

# SPDX-License-Identifier: Apache-2.0
"""The offline steps of the demo. Each returns the numbers and texts that it prints, as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from demo.measures import answer, log_odds, perplexities
from demo.texts import CHOICE, CONCLUSION, CONTEXTS, HELD_OUT, MOOD, OTHER_REQUESTS, SAD_REQUESTS, SHOWN, Trait, mood
from vllm_steer import SamplingParams
from vllm_steer.lab import Direction, Directions, make

LAYERS = (6, 10, 14)
DOSES = (0.1, 0.2, 0.3)
TRIED_DOSE = 0.2
MAX_PERPLEXITY = 2.0
"""Largest perplexity of steered text under the model without steering, as a multiple of that of plain text."""
CHOICE_TOKENS, SHOWN_TOKENS, GATE_TOKENS = 24, 40, 24
GATE_BOUND = -0.25
"""Probe score of a request below which its answer is steered. The mean sad sentence of the pairs has -1."""

Layers = Mapping[int, Direction]
Values = dict[str, Any]


def find_directions(llm: Any, trait: Trait) -> Directions:
    """Return the direction of each layer from the minus pole to the plus pole: the difference of the means."""
    return make(llm, [{"positive": plus, "negative": minus} for plus, minus in trait.pairs])


def mean_mood(outputs: Sequence[Any]) -> float:
    """Return the mean mood of the texts of outputs."""
    return float(np.mean([mood(output.outputs[0].text) for output in outputs]))


def shifts(llm: Any, trait: Trait, each: Sequence[Sequence[Any]]) -> list[float]:
    """Return how much each list of edits shifts the log-odds of the next word."""
    odds = log_odds(llm, trait, [[], *each]).mean(1)
    return (odds[1:] - odds[0]).tolist()


def try_traits(llm: Any, directions: Sequence[tuple[Trait, Layers]]) -> list[Values]:
    """Return the effects of each trait's direction at one dose and each layer."""
    rows = []
    for trait, layers in directions:
        each = [[layers[layer].add(dose)] for layer in LAYERS for dose in (-TRIED_DOSE, TRIED_DOSE)]
        found = shifts(llm, trait, each)
        for layer, minus, plus in zip(LAYERS, found[0::2], found[1::2], strict=True):
            rows.append({"trait": f"{trait.minus} to {trait.plus}", "layer": layer, "minus": minus, "plus": plus})
    return rows


def try_doses(llm: Any, layers: Layers) -> list[Values]:
    """Return mood and perplexity of answers for each layer and dose. The first entry is without steering."""
    plan = [(layer, sign * dose) for layer in LAYERS for sign in (-1, 1) for dose in DOSES]
    groups = answer(llm, CHOICE, [[], *([layers[layer].add(dose)] for layer, dose in plan)], CHOICE_TOKENS)
    read = perplexities(llm, groups)
    return [
        {"layer": layer, "dose": dose, "mood": mean_mood(group), "perplexity": perplexity}
        for (layer, dose), group, perplexity in zip([(None, 0.0), *plan], groups, read, strict=True)
    ]


def choose(cells: Sequence[Values]) -> Values:
    """Return the layer and its doses, of both signs, that move the mood of coherent text furthest apart.

    Raises:
        RuntimeError: No layer has coherent text at a dose of each sign.
    """
    limit = MAX_PERPLEXITY * cells[0]["perplexity"]
    best: Values = {}
    for layer in dict.fromkeys(cell["layer"] for cell in cells[1:]):
        coherent = [cell for cell in cells if cell["layer"] == layer and cell["perplexity"] <= limit]
        low = min((cell for cell in coherent if cell["dose"] < 0), key=lambda cell: cell["mood"], default=None)
        high = max((cell for cell in coherent if cell["dose"] > 0), key=lambda cell: cell["mood"], default=None)
        if low and high and high["mood"] - low["mood"] > best.get("spread", 0):
            spread = high["mood"] - low["mood"]
            best = {"layer": layer, "minus": low["dose"], "plus": high["dose"], "spread": spread}
    if not best:
        raise RuntimeError(f"No layer has doses of both signs with a perplexity up to {limit:.1f}.")
    return best


def control(llm: Any, direction: Direction, doses: tuple[float, float]) -> Values:
    """Return the effects of the direction and of random directions at the same doses."""
    tried = [direction, *direction.random()]
    found = shifts(llm, MOOD, [[each.add(dose)] for each in tried for dose in doses])
    return {"minus": found[0], "plus": found[1], "random": found[2:]}


def show(llm: Any, direction: Direction, doses: tuple[float, float]) -> Values:
    """Return answers in three columns to questions that nothing was chosen on."""
    names = ("minus", "plain", "plus")
    groups = answer(llm, SHOWN, [[direction.add(doses[0])], [], [direction.add(doses[1])]], SHOWN_TOKENS)
    texts = [[output.outputs[0].text for output in group] for group in groups]
    return {
        "rows": [
            {"prompt": question, **dict(zip(names, row, strict=True))}
            for question, *row in zip(SHOWN, *texts, strict=True)
        ],
        "mood": dict(zip(names, map(mean_mood, groups), strict=True)),
        "perplexity": dict(zip(names, perplexities(llm, groups), strict=True)),
    }


def try_probes(llm: Any, layers: Layers) -> Values:
    """Return the probe scores of held-out sentences at each layer, and those of the layer that separates them best."""
    readouts = {f"layer-{layer}": layers[layer].probe(positions="all") for layer in LAYERS}
    reading = SamplingParams(max_tokens=1, temperature=0.0, readouts=readouts)
    outputs = llm.generate([text for pair in HELD_OUT for text in pair], reading, use_tqdm=False)
    found = []
    for layer, name in zip(LAYERS, readouts, strict=True):
        scores = np.array([output.outputs[0].readouts[name].values[1:].mean() for output in outputs])
        happy, sad = scores[0::2], scores[1::2]
        separation = (happy.mean() - sad.mean()) / np.sqrt((happy.var() + sad.var()) / 2)
        found.append({"layer": layer, "separation": float(separation), "scores": [happy.tolist(), sad.tolist()]})
    return {"tried": found, **max(found, key=lambda each: float(each["separation"]))}


def gate(llm: Any, probe: Direction, direction: Direction, dose: float) -> Values:
    """Return answers to sad and other requests, plain and with an edit that applies if the probe finds the user sad."""
    requests = [*SAD_REQUESTS, *OTHER_REQUESTS]
    readouts = {"mood": probe.probe(positions="user")}
    when = {"readout": "mood", "below": GATE_BOUND, "window": "prompt", "positions": "user"}
    each = [[], [direction.add(dose, tokens="generated", when=when)]]
    plain, gated = answer(llm, requests, each, GATE_TOKENS, readouts=readouts)
    rows = [
        {
            "prompt": request,
            "sad": request in SAD_REQUESTS,
            "score": float(before.outputs[0].readouts["mood"].values.mean()),
            "steered": float(after.outputs[0].steering_trace.gates.mean()),
            "plain": before.outputs[0].text,
            "gated": after.outputs[0].text,
        }
        for request, before, after in zip(requests, plain, gated, strict=True)
    ]
    return {"bound": GATE_BOUND, "rows": rows}


def ablate(llm: Any, layers: Layers) -> Values:
    """Return how far happy and sad contexts are apart in what the model says next, plain and without a direction.

    The ablation holds the component of every token, at every layer, at its mean.
    """
    starts = [context + CONCLUSION for pair in CONTEXTS for context in pair]
    without = [direction.clamp() for direction in layers.values()]
    random = zip(*([each.clamp() for each in direction.random()] for direction in layers.values()), strict=True)
    odds = log_odds(llm, MOOD, [[], without, *random], starts)
    gaps = (odds[:, 0::2] - odds[:, 1::2]).mean(1).tolist()
    return {"plain": gaps[0], "ablated": gaps[1], "random": gaps[2:]}

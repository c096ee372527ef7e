# SPDX-License-Identifier: Apache-2.0
"""What the demo claims, as checks of its results. `make demo` fails if one of them does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from demo.study import MAX_PERPLEXITY

MIN_MOOD = 2.0
"""Smallest distance of the mood of steered text from that of plain text, in words per hundred."""
MIN_SEPARATION = 2.0
"""Smallest distance of the probe's mean scores of held-out sentences, in standard deviations."""
MAX_REMAINING, MIN_REMAINING = 0.25, 0.6
"""Largest part of the contexts' effect that remains without the direction, and smallest without a random one."""
MIN_STREAMED = 0.1
"""Smallest distance between the mean scores of the tokens of a happy and of a sad answer."""

Results = dict[str, Any]


class Check(NamedTuple):
    """A claim with its numbers, and whether it holds."""

    step: str
    claim: str
    holds: bool


def dose(results: Results) -> Iterator[tuple[str, bool]]:
    """Judge the choice of layer and doses."""
    plain, *cells = results["doses"]
    chosen = results["chosen"]
    for sign in ("minus", "plus"):
        (cell,) = [c for c in cells if (c["layer"], c["dose"]) == (chosen["layer"], chosen[sign])]
        ratio = cell["perplexity"] / plain["perplexity"]
        claim = f"perplexity at dose {cell['dose']:+} is {ratio:.2f} times that of plain text, at most {MAX_PERPLEXITY}"
        yield claim, ratio <= MAX_PERPLEXITY


def control(results: Results) -> Iterator[tuple[str, bool]]:
    """Judge the effect against that of random directions."""
    found = results["control"]
    low, high = min(found["random"]), max(found["random"])
    number = len(found["random"]) // 2
    yield f"{number} random directions of the same length shift the log-odds by {low:+.1f} to {high:+.1f}", number >= 20
    yield f"towards sad, the direction shifts them further: {found['minus']:+.1f}", found["minus"] < min(low, -high)
    yield f"towards happy, the direction shifts them further: {found['plus']:+.1f}", found["plus"] > max(high, -low)


def shown(results: Results) -> Iterator[tuple[str, bool]]:
    """Judge the answers that are shown."""
    mood, perplexity = results["shown"]["mood"], results["shown"]["perplexity"]
    for sign, name in ((-1, "minus"), (1, "plus")):
        moved = sign * (mood[name] - mood["plain"])
        yield f"mood {mood[name]:+.1f}, plain {mood['plain']:+.1f}: at least {MIN_MOOD} apart", moved >= MIN_MOOD
        ratio = perplexity[name] / perplexity["plain"]
        claim = f"perplexity {perplexity[name]:.1f}, plain {perplexity['plain']:.1f}: at most {MAX_PERPLEXITY} times"
        yield claim, ratio <= MAX_PERPLEXITY


def probe(results: Results) -> Iterator[tuple[str, bool]]:
    """Judge the probe."""
    found = results["probe"]
    happy, sad = found["scores"]
    right = sum(score > 0 for score in happy) + sum(score < 0 for score in sad)
    total = len(happy) + len(sad)
    yield f"layer {found['layer']}: {right} of {total} held-out sentences on their side of 0", right >= 0.9 * total
    claim = f"their means are {found['separation']:.1f} standard deviations apart, at least {MIN_SEPARATION}"
    yield claim, found["separation"] >= MIN_SEPARATION


def gate(results: Results) -> Iterator[tuple[str, bool]]:
    """Judge the gate."""
    rows = results["gate"]["rows"]
    sad, other = [r for r in rows if r["sad"]], [r for r in rows if not r["sad"]]
    yield (
        f"{len(sad)} sad requests are steered at all tokens, and their answers change",
        all(row["steered"] == 1 and row["gated"] != row["plain"] for row in sad) and bool(sad),
    )
    yield (
        f"{len(other)} other requests are steered nowhere, and their answers are those without steering",
        all(row["steered"] == 0 and row["gated"] == row["plain"] for row in other) and bool(other),
    )


def ablation(results: Results) -> Iterator[tuple[str, bool]]:
    """Judge the ablation."""
    plain, without, random = (results["ablation"][name] for name in ("plain", "ablated", "random"))
    yield f"happy and sad contexts are {plain:.1f} apart in log-odds of the next word", plain > 2
    claim = f"without the direction they are {without:.1f} apart, at most {MAX_REMAINING} of it"
    yield claim, abs(without) <= MAX_REMAINING * plain
    least = min(random)
    claim = f"without one of {len(random)} random directions they are at least {least:.1f} apart, {MIN_REMAINING} of it"
    yield claim, least >= MIN_REMAINING * plain and len(random) >= 20


def http(results: Results) -> Iterator[tuple[str, bool]]:
    """Judge the answers of the server."""
    found = results["http"]
    offline = next(row for row in results["shown"]["rows"] if row["prompt"] == found["prompt"])
    for name in ("minus", "plain", "plus"):
        words, same = found[name].split(), offline[name].split()
        equal = next((i for i, pair in enumerate(zip(words, same, strict=False)) if pair[0] != pair[1]), len(words))
        yield f"{name}: the first {equal} of {len(words)} words are those of LLM.chat, at least 5", equal >= 5
    sad, happy = (sum(each["scores"]) / len(each["scores"]) for each in found["streams"])
    claim = (
        f"streamed tokens of a sad text score {sad:+.2f}, of a happy one {happy:+.2f}: at least {MIN_STREAMED} apart"
    )
    yield claim, happy - sad >= MIN_STREAMED


STEPS: tuple[Callable[[Results], Iterator[tuple[str, bool]]], ...] = (
    dose,
    control,
    shown,
    probe,
    gate,
    ablation,
    http,
)


def checks(results: Results) -> list[Check]:
    """Return the checks of the steps that the results contain."""
    named = {"dose": "chosen", "shown": "shown"}
    steps = [step for step in STEPS if named.get(step.__name__, step.__name__) in results]
    return [Check(step.__name__, claim, bool(holds)) for step in steps for claim, holds in step(results)]

# SPDX-License-Identifier: Apache-2.0
"""The README's answers of a steered chat model, from the result that ``make demo ARGS=--record`` writes."""

from __future__ import annotations

from pages import load_result, table

ROWS = 3
"""Number of prompts in the README, from the first of the demo."""

TEXT = """
`make demo` asks {model} these questions on a CPU, and checks every figure below.
One direction, the difference of the means over thirty pairs of sad and happy sentences, is added to the output of
layer {layer}: {minus:+} and {plus:+} times the length of the stream. The answers are greedy and cut short.

* The log-odds of a happy against a sad next word move by {low:+.1f} and {high:+.1f}; with {random} random directions of
  the same length, by {random_low:+.1f} to {random_high:+.1f}.
* The perplexity of the answers under the model without steering is {ppl_minus:.1f} and {ppl_plus:.1f}; that of plain
  answers is {ppl_plain:.1f}.
* As a probe, the direction puts {right} of {total} new sentences on their side. As the condition of an edit, the probe
  steers the answers to sad users only.
* With the direction's component held at its mean in all layers, a happy or sad context changes the next word by
  {gone:.0%} less.
"""


def answers() -> str:
    """Return the README's table of answers, and the figures about them."""
    found = load_result("demo.json")
    shown, control, chosen = found["shown"], found["control"], found["chosen"]
    happy, sad = found["probe"]["scores"]
    rows = [tuple(cell(row[name]) for name in ("prompt", "minus", "plain", "plus")) for row in shown["rows"][:ROWS]]
    figures = TEXT.format(
        model=found["model"],
        layer=chosen["layer"],
        minus=chosen["minus"],
        plus=chosen["plus"],
        low=control["minus"],
        high=control["plus"],
        random=len(control["random"]) // 2,
        random_low=min(control["random"]),
        random_high=max(control["random"]),
        **{f"ppl_{name}": value for name, value in shown["perplexity"].items()},
        right=sum(score > 0 for score in happy) + sum(score < 0 for score in sad),
        total=len(happy) + len(sad),
        gone=1 - found["ablation"]["ablated"] / found["ablation"]["plain"],
    )
    return table(("prompt", "steered towards sad", "not steered", "steered towards happy"), rows) + figures


def cell(text: str) -> str:
    """Return a text in one line, with an ellipsis if it does not end with a sentence."""
    line = " ".join(text.split())
    return line if line.endswith((".", "!", "?", '"')) else f"{line} …"

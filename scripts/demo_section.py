# SPDX-License-Identifier: Apache-2.0
"""Sections of README and docs/index.md about ``make demo``, from the result of ``make demo ARGS=--record``."""

from __future__ import annotations

from typing import Any

from pages import ROOT, load_result, table

from demo.study import SHOWN_TOKENS
from demo.texts import MOOD, ordered

PLACES = ("minus", "plain", "plus")

TRY = """
```bash
make studio    # to try it: a chat model with the studio, a page in the browser
make demo      # measures the answers below; {minutes:.0f} minutes on {cpus} cores after the set-up
pip install .  # to use it beside your own vLLM 0.33 or 0.32, which stays as it is
```

Run them in a checkout of this repository. The two `make` commands need Python 3.11 or later, but no GPU and no vLLM of
your own: the first of them puts vLLM's CPU build with PyTorch, several gigabytes, into `.venv`, and the model into
`.models` ({size}).
"""

ANSWERS = """
> {prompt}

{table}
{model} with one direction, the difference of the means over {pairs} pairs of sad and happy sentences, added to the
output of layer {layer}: {minus:+} and {plus:+} times the norm of the residual stream. In {ordered} of {prompts}
prompts, the share of happy words less that of sad words (`demo/texts.py`) rises from column to column; this is the
first. Greedy, cut off at {tokens} tokens.
"""

FIGURES = """
`make demo` asks {model} on a CPU and checks every figure in this list. One direction, the difference of the means
over {pairs} pairs of sad and happy sentences, is added to the output of layer {layer}: {minus:+} and {plus:+} times
the norm of the residual stream.

* The log-odds of {words_plus} happy next words ({first_plus}, …) against {words_minus} sad ones ({first_minus}, …),
  the mean over {starts} beginnings of sentences such as "{start}", move by {low:+.1f} and {high:+.1f}; with {random}
  random directions of the same norm, by {random_low:+.1f} to {random_high:+.1f}.
* The perplexity of the answers to {prompts} prompts under the model without steering is {ppl_minus:.1f} and
  {ppl_plus:.1f}; that of plain answers is {ppl_plain:.1f}. It says how unlikely the model finds the text; 1 is
  certainty.
* As a probe, the direction puts {right} of {total} new sentences on their side. An edit that applies only where the
  probe reads sad changes the answers to {sad} sad users and none to {other} others.
* With the direction's component held at its mean in all layers, happy and sad contexts are {ablated:.1f} apart in the
  log-odds of the next word, instead of {apart:.1f}.
"""


def try_it() -> str:
    """Return the README's commands to install and to try, with their time and size."""
    found = load_result("demo.json")
    (target,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("model:")]
    return TRY.format(
        minutes=found["seconds"] / 60,
        cpus=found["environment"]["cpus"],
        size=target.partition("(")[2].rstrip(")"),
    ).lstrip()


def answers() -> str:
    """Return the README's answers to one prompt, with how they were steered and chosen."""
    found = load_result("demo.json")
    rows = found["shown"]["rows"]
    chosen = ordered(rows)
    heads = ("steered towards sad", "not steered", "steered towards happy")
    return ANSWERS.format(
        prompt=chosen[0]["prompt"],
        table=table(heads, [tuple(cell(chosen[0][name]) for name in PLACES)]),
        prompts=len(rows),
        ordered=len(chosen),
        tokens=SHOWN_TOKENS,
        **_steering(found),
    ).lstrip()


def figures() -> str:
    """Return the figures of ``make demo`` for the first page of the documentation."""
    found = load_result("demo.json")
    shown, control, gate = found["shown"], found["control"], found["gate"]["rows"]
    happy, sad = found["probe"]["scores"]
    return FIGURES.format(
        **_steering(found),
        words_plus=len(MOOD.plus_words),
        words_minus=len(MOOD.minus_words),
        first_plus=", ".join(MOOD.plus_words[:2]),
        first_minus=", ".join(MOOD.minus_words[:2]),
        starts=len(MOOD.starts),
        start=MOOD.starts[0],
        low=control["minus"],
        high=control["plus"],
        random=len(control["random"]) // 2,
        random_low=min(control["random"]),
        random_high=max(control["random"]),
        prompts=len(shown["rows"]),
        **{f"ppl_{name}": value for name, value in shown["perplexity"].items()},
        right=sum(score > 0 for score in happy) + sum(score < 0 for score in sad),
        total=len(happy) + len(sad),
        sad=sum(row["sad"] for row in gate),
        other=sum(not row["sad"] for row in gate),
        apart=found["ablation"]["plain"],
        ablated=found["ablation"]["ablated"],
    ).lstrip()


def _steering(found: dict[str, Any]) -> dict[str, Any]:
    """Return the model, layer, doses and number of pairs of the demo."""
    return {"model": found["model"], "pairs": len(MOOD.pairs), **found["chosen"]}


def cell(text: str) -> str:
    """Return a text in one line, with an ellipsis if it does not end with a sentence."""
    line = " ".join(text.split())
    return line if line.endswith((".", "!", "?", '"')) else f"{line} …"

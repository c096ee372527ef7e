# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of docs/reference from the tables in the code; with --check, says whether they are up to date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from vllm_steer.config import LIMITS
from vllm_steer.models.recipes import RECIPES
from vllm_steer.points import POINTS
from vllm_steer.spec import KINDS

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/reference.py from the tables in the code. -->\n\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def models() -> str:
    rows = [
        (f"`{r.layer}`", r.shape, f"in front of `{r.mid}`" if r.mid else "refused: attention and MLP run in parallel")
        for r in RECIPES
    ]
    return (
        "# Models\n\n"
        "A model is served when its decoder layers are of one of these classes. Each is proven against HF Transformers\n"
        "by `tests/conformance` (`python scripts/parity_table.py` prints the figures). Every other class is refused when\n"
        "the engine starts. `pair`: the stream travels as two summands; `single`: as one tensor. `pre_attn` and\n"
        "`post_block` are served on all of them.\n\n" + table(("decoder layer", "stream", "`post_attn`"), rows)
    )


def points() -> str:
    rows = [(f"`{p.name}`", p.identity, p.seen_by, *p.aliases.values()) for p in POINTS.values()]
    libraries = tuple(next(iter(POINTS.values())).aliases)
    return "# Hook points\n\n" + table(("point", "value", "who sees an edit", *libraries), rows)


def edits() -> str:
    rows = [(f"`{k.name}`", ", ".join(f"`{p}`" for p in k.params), f"`{k.formula}`") for k in KINDS.values()]
    return (
        "# Edits\n\n`x` is a token's row of the residual stream, `v` the vector, `u = v / |v|`, `s` the strength.\n"
        "All arithmetic is float32, with one rounding to the model's dtype at the end. Several edits at one site apply in the order\n"
        "given: `steering_vectors`, `prefill_steering_vectors`, `decode_steering_vectors`, then `steering`.\n\n"
        + table(("kind", "takes", "new value"), rows)
    )


def limits() -> str:
    rows = [
        (f"`{limit.name}`", f"`--steering-{limit.name.replace('_', '-')}`", str(limit.default), limit.help)
        for limit in LIMITS
    ]
    return (
        "# Limits\n\nFixed when the engine starts: `steering_config={...}` of `LLM`, or flags of the server.\n"
        "A request that needs more than one of them at once is refused; one that does not fit beside those that run waits for its turn.\n\n"
        + table(("setting", "flag", "default", "counts"), rows)
    )


PAGES: dict[str, Callable[[], str]] = {
    "models.md": models,
    "points.md": points,
    "edits.md": edits,
    "limits.md": limits,
}


def main() -> None:
    stale = []
    for name, page in PAGES.items():
        path, text = FOLDER / name, NOTE + page()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python scripts/reference.py")


if __name__ == "__main__":
    main()

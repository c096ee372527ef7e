# SPDX-License-Identifier: Apache-2.0
"""Helpers: the requests that every architecture runs, all in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from tests.conformance.branches import BRANCHES
from tests.conformance.edits import KINDS, EditAt, Formula, Tokens
from tests.conformance.hf_reference import Array, Trace
from tests.conformance.model import LAYERS, TinyModel

PROMPTS = (
    (5, 9, 17, 33, 60, 2, 11, 90, 41),
    (7, 3, 100, 55, 21, 90, 14, 8, 40, 77, 6, 5, 31, 19),
    (64, 12, 81, 50, 126),
)
NEW_TOKENS = 5
LAYER = 1
STREAM_FIELDS = {"pre_attn": "x_in", "post_attn": "x_mid", "post_block": "x_out"}
TRACE_FIELDS = {**STREAM_FIELDS, **{point: point for point in BRANCHES}}
"""Field of a trace that holds the value at each point."""


@dataclass(frozen=True)
class Case:
    """One request; without edits, it must come out of the shared batch unchanged."""

    name: str
    prompt: tuple[int, ...]
    edits: tuple[EditAt, ...] = ()

    @property
    def points(self) -> set[str]:
        """Points that the request edits."""
        return {edit.point for edit in self.edits}


def cases_for(tiny: TinyModel, plain: Trace, branches: Sequence[str] = ()) -> list[Case]:
    """Return the requests for one architecture.

    At a middle layer, every kind of edit at every supported point over every selector; then the first and the last
    layer, all layers at once, several edits in one request, and plain requests in between.

    Args:
        tiny: The architecture.
        plain: The unedited trace of the first prompt.
        branches: The points on the branches to edit as well.
    """
    make = EditMaker(plain)
    stream_points = [point for point in STREAM_FIELDS if point not in tiny.refused]
    cases: list[Case] = []

    def add(name: str, *edits: EditAt) -> None:
        cases.append(Case(name, PROMPTS[len(cases) % len(PROMPTS)], edits))

    for point, kind in product(stream_points, KINDS):
        for label, tokens in SELECTORS.items():
            add(f"{kind} at {point}, {label}", make.edit(kind, point, LAYER, tokens))
        add(f"plain after {kind} at {point}")
    for kind in KINDS:
        add(f"{kind} at pre_attn of layer 0", make.edit(kind, "pre_attn", 0))
        add(f"{kind} at post_block of the last layer", make.edit(kind, "post_block", LAYERS - 1))
    for point in stream_points:
        add(f"add at {point}, every layer", make.edit("add", point, "all", strength=0.3))
        add(f"ablate at {point}, two layers", make.edit("ablate", point, (0, LAYERS - 1)))
        add(
            f"add then clamp then add_normed at {point}",
            *(make.edit(kind, point, LAYER) for kind in ("add", "clamp", "add_normed")),
        )
        add(
            f"different edits of prompt and generated tokens at {point}",
            make.edit("add", point, LAYER, "prompt"),
            make.edit("ablate", point, LAYER, "generated"),
        )
    add("all stream points at once", *(make.edit("add", point, LAYER) for point in stream_points))
    add(
        "add at pre_attn of the next layer, ablate at post_block of this one",
        make.edit("add", "pre_attn", LAYER + 1),
        make.edit("ablate", "post_block", LAYER),
    )
    for point in branches:
        for kind in KINDS:
            add(f"{kind} at {point}, all", make.edit(kind, point, LAYER))
        add(f"ablate at {point}, positions", make.edit("ablate", point, LAYER, SELECTORS["positions"]))
        add(f"add at {point}, every layer, generated", make.edit("add", point, "all", "generated", strength=0.5))
    if branches:
        add("every point at once", *(make.edit("ablate", point, LAYER) for point in (*stream_points, *branches)))
    return cases


# In the shortest prompt the absolute positions reach the generated tokens; in the others they are prompt positions.
SELECTORS: Mapping[str, Tokens] = {
    "all": "all",
    "prompt": "prompt",
    "generated": "generated",
    "last_prompt": "last_prompt",
    "positions": [1, (3, 7), -2],
}


class EditMaker:
    """Make edits with a large effect: vectors as long as the stream at their point, partly along it."""

    def __init__(self, plain: Trace) -> None:
        self._plain = plain
        self._random = np.random.default_rng(11)

    def edit(
        self, kind: str, point: str, layers: int | tuple[int, ...] | str, tokens: Tokens = "all", strength: float = 1.0
    ) -> EditAt:
        rows: Array = getattr(self._plain, TRACE_FIELDS[point])[layers if isinstance(layers, int) else LAYER]
        length = float(np.linalg.norm(rows, axis=-1).mean())
        noise = self._random.standard_normal(rows.shape[-1])
        vector = (rows.mean(0) + noise * length / np.linalg.norm(noise)).astype(np.float32)
        along = rows @ (vector / np.linalg.norm(vector))
        # Bounds beyond all rows, on one side or the other.
        bounds: dict[str, float] = {}
        if kind == "clamp":
            above = bool(self._random.integers(2))
            bounds["low" if above else "high"] = float(along.max() + length if above else along.min() - length)
            if self._random.integers(2):
                bounds["high" if above else "low"] = bounds["low" if above else "high"]
        formula = Formula(kind, vector, strength, **bounds)  # type: ignore[arg-type]
        return EditAt(formula, point, layers, tokens)  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""The proof of one architecture, by either kind of evidence, and what is kept of it."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.conformance.branches import served_branches
from tests.conformance.cases import PROMPTS, STREAM_AT, Case
from tests.conformance.engine import ask, layer_classes, running
from tests.conformance.identities import Check, check_identities
from tests.conformance.model import TinyModel
from tests.conformance.no_reference import random_weights, save_config
from tests.conformance.parity import MIN_EFFECT, examine
from tests.conformance.reference_process import ReferenceProcess

TOLERANCE_INSIDE = 1e-4
"""Largest difference of two runs in float32 that counts as agreement."""
ROUNDED_ROW = 0.02
"""The same for a captured row in bfloat16, in lengths of the row: it rounds every sum."""
CLOSE, USUAL = 0.3, 0.05
"""Largest and median part of an edit's effect by which bfloat16 may miss it (a token may go to another expert); an edit
one sublayer late misses by most of it."""
MIN_EFFECT_ROUNDED = 0.05
FAR_FROM_HF = 0.1
"""Largest mean distance of rows in bfloat16 from HF's in float32."""


@dataclass(frozen=True)
class Proof:
    """What was seen: ``checks``, the layer classes with taps, and the distance of captured rows from HF's, if known."""

    architecture: str
    kind: str
    layers: Sequence[str]
    checks: Sequence[Check]
    hf_value: float | None = None

    @property
    def value(self) -> float:
        """Largest relative distance of a row."""
        return max(check.error for check in self.checks if check.effect is None)

    @property
    def cause(self) -> float:
        """Largest difference of a log-probability."""
        return max(check.error for check in self.checks if check.effect is not None)

    def problems(self, tiny: TinyModel) -> list[str]:
        """What keeps this from being a proof of the row, a sentence each."""
        rounded = tiny.dtype == "bfloat16"
        found = [
            f"{check.name}: off by {check.error:.1e}" + (f" of {check.effect:.1e}" if check.effect is not None else "")
            for check in self.checks
            if not check.error < _allowed(check, rounded)
        ]
        least = MIN_EFFECT_ROUNDED if rounded else MIN_EFFECT
        found += [f"{c.name}: changes nothing" for c in self.checks if c.effect is not None and not c.effect > least]
        if rounded:
            usual = statistics.median(check.error / check.effect for check in self.checks if check.effect)
            if not usual < USUAL:
                found.append(f"half of the edits miss by more than {usual:.1e} of their effect")
            if self.hf_value is not None and not self.hf_value < FAR_FROM_HF:
                found.append(f"rows are {self.hf_value:.1e} from those of HF")
        if set(self.layers) != tiny.layers:
            found.append(f"taps on {', '.join(self.layers)}")
        return found

    def as_row(self, tiny: TinyModel) -> dict[str, Any]:
        """The figures, as they are kept in ``benchmarks/results``."""
        return {
            "row": tiny.name,
            "architecture": self.architecture,
            "layers": sorted(self.layers),
            "recipe": tiny.recipe,
            "points": [point for point in STREAM_AT if point not in tiny.refused],
            "branches": list(served_branches(tiny)),
            "proof": self.kind,
            "value": float(f"{self.value:.1e}"),
            "cause": float(f"{self.cause:.1e}"),
            "dtype": tiny.dtype,
        }


def _allowed(check: Check, rounded: bool) -> float:
    if not rounded:
        return TOLERANCE_INSIDE
    return ROUNDED_ROW if check.effect is None else CLOSE * check.effect


def prove_against_hf(tiny: TinyModel, folder: Path, reference: ReferenceProcess) -> Proof:
    """The cases of ``parity.py``, eager, as checks."""
    report = examine(tiny, "eager", folder, reference)
    checks = [Check(o.case.name, o.error, o.effect if o.case.edits else 1.0) for o in report.outcomes]
    checks += [Check(f"{o.case.name}, {p}", e) for o in report.outcomes for p, e in o.value_errors.items()]
    return Proof(architecture_of(folder / tiny.name), "HF Transformers", sorted(report.layers), checks)


def prove(tiny: TinyModel, folder: Path, reference: ReferenceProcess) -> Proof:
    """The stronger kind of proof that this row can have."""
    if tiny.is_known_to_hf and tiny.inside is None:
        return prove_against_hf(tiny, folder, reference)
    return prove_inside(tiny, folder, reference)


def prove_inside(tiny: TinyModel, folder: Path, reference: ReferenceProcess) -> Proof:
    """The identities inside vLLM; on HF's weights where HF has the model, else on random ones."""
    if tiny.is_known_to_hf:
        path = reference.save(tiny.name, folder)
        return _inside(tiny, path, {"enable_prefix_caching": False}, reference)
    path = save_config(tiny, folder)
    with random_weights(tiny) as settings:
        return _inside(tiny, path, settings, None)


def _inside(tiny: TinyModel, path: Path, settings: dict[str, Any], reference: ReferenceProcess | None) -> Proof:
    tiny = dataclasses.replace(tiny, engine={**(tiny.engine or {}), **settings})
    with running(tiny, path, "eager", served_branches(tiny)) as llm:
        checks = check_identities(tiny, llm)
        far = None if reference is None else _far_from_hf(tiny, llm, reference)
        return Proof(architecture_of(path), "identities inside vLLM", sorted(layer_classes(llm)), checks, far)


def _far_from_hf(tiny: TinyModel, llm: Any, reference: ReferenceProcess) -> float:
    """Mean relative distance of the captured rows of a plain request from HF's."""
    served = [point for point in STREAM_AT if point not in tiny.refused]
    streams = ask(llm, [Case("plain", PROMPTS[0])], served, new_tokens=1)[0].streams
    trace = reference.traces(tiny.name, [(PROMPTS[0], len(PROMPTS[0]), ())])[0]
    far = [
        np.linalg.norm(streams[point] - getattr(trace, STREAM_AT[point]), axis=-1)
        / np.linalg.norm(getattr(trace, STREAM_AT[point]), axis=-1)
        for point in served
    ]
    return float(np.mean(far))


def architecture_of(path: Path) -> str:
    """vLLM's name of the model at ``path``."""
    architecture: str = json.loads((path / "config.json").read_text())["architectures"][0]
    return architecture

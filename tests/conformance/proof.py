# SPDX-License-Identifier: Apache-2.0
"""Proof of one architecture, by parity with HF Transformers or by identities inside vLLM, and its figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.conformance.branches import supported_branches
from tests.conformance.cases import PROMPTS, STREAM_FIELDS, Case
from tests.conformance.engine import generate, layer_classes, steered_engine
from tests.conformance.identities import MIXED, Check, check_identities
from tests.conformance.model import TinyModel
from tests.conformance.no_reference import random_weights, save_config
from tests.conformance.parity import MIN_EFFECT, examine
from tests.conformance.reference_process import ReferenceProcess

IDENTITY_TOLERANCE = 1e-4
"""Largest difference of two float32 runs that counts as agreement."""
BFLOAT16_ROW_TOLERANCE = 2**-7
"""The same for a captured bfloat16 row, in lengths of the row: two sums, each rounded by at most 2**-8."""
MIXED_ROW_TOLERANCE = 2**-5
"""The same for models of ``MIXED``, whose rows come from another run: formulas round the streams of a layer twice more
than kernels that mix unrounded streams. Right taps are off by up to 0.019, incomplete streams by 0.06 or more."""
QUANTISED_MIX_TOLERANCE, QUANTISED_MIX_MISS = 2**-3, 0.1
"""Limits for such models with quantised weights: of a row, and of the error of an edit at the median token as a
fraction of the effect of the strongest edit. Rounding an input in another way moves some numbers by a step of the
8-bit format. Incomplete streams may pass this limit of rows; the rows with unquantised weights rule them out."""
MAX_MISS, MAX_OWN_MISS = 0.02, 0.5
"""Largest error of an edit at the median token in bfloat16, as a fraction of the effect of the strongest edit, and of
its own effect. Rounding changes a stream by up to 2**-8, and right taps miss by up to 0.017, late ones by 0.3 or more.
Not at every token, since rounding may send some to other experts."""
BFLOAT16_MIN_EFFECT = 0.05
MAX_DISTANCE_FROM_HF = 0.1
"""Largest mean distance of rows in bfloat16 from HF's in float32."""


@dataclass(frozen=True)
class Proof:
    """Evidence for one row: the layer classes with taps, the checks, and the distance of captured rows from HF's."""

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

    def problems(self, tiny: TinyModel, max_miss: float | None = None) -> list[str]:
        """Return why this does not prove the row, one sentence each.

        ``max_miss`` is for models that round more than bfloat16: the largest fraction of its effect by which an edit
        may be off, at any token. Models of ``MIXED`` have limits of their own instead.
        """
        rounded = tiny.dtype == "bfloat16"
        found = [
            f"{check.name}: off by {check.error:.1e}" + (f" of {check.effect:.1e}" if check.effect is not None else "")
            for check in self.checks
            if not (self._agrees_rounded(tiny, check, max_miss) if rounded else check.error < IDENTITY_TOLERANCE)
        ]
        least = BFLOAT16_MIN_EFFECT if rounded else MIN_EFFECT
        found += [f"{c.name}: changes nothing" for c in self.checks if c.effect is not None and not c.effect > least]
        if rounded and self.hf_value is not None and not self.hf_value < MAX_DISTANCE_FROM_HF:
            found.append(f"rows are {self.hf_value:.1e} from those of HF")
        if set(self.layers) != tiny.layers:
            found.append(f"taps on {', '.join(self.layers)}")
        return found

    def miss(self, check: Check) -> float:
        """Return the error at the median token as a fraction of the effect of the strongest edit."""
        error, _ = check.medians or (check.error, None)
        return error / max((other.medians or (0.0, other.effect or 0.0))[1] for other in self.checks)

    def _agrees_rounded(self, tiny: TinyModel, check: Check, max_miss: float | None) -> bool:
        if tiny.recipe in MIXED and max_miss is not None:
            if check.effect is None:
                return check.error < QUANTISED_MIX_TOLERANCE
            return self.miss(check) < QUANTISED_MIX_MISS
        if check.effect is None:
            return check.error < (MIXED_ROW_TOLERANCE if tiny.recipe in MIXED else BFLOAT16_ROW_TOLERANCE)
        if max_miss is not None:
            return check.error < max_miss * check.effect
        error, effect = check.medians or (check.error, check.effect)
        return self.miss(check) < MAX_MISS and error < MAX_OWN_MISS * effect

    def as_row(self, tiny: TinyModel) -> dict[str, Any]:
        """Return the figures in the form of ``benchmarks/results``."""
        return {
            "row": tiny.name,
            "architecture": self.architecture,
            "layers": sorted(self.layers),
            "recipe": tiny.recipe,
            "points": [point for point in STREAM_FIELDS if point not in tiny.refused],
            "branches": list(supported_branches(tiny)),
            "proof": self.kind,
            "value": float(f"{self.value:.1e}"),
            "cause": float(f"{self.cause:.1e}"),
            "dtype": tiny.dtype,
        }


def prove_against_hf(tiny: TinyModel, folder: Path, reference: ReferenceProcess) -> Proof:
    """Prove a row by the cases of ``parity.py``, eager."""
    report = examine(tiny, "eager", folder, reference)
    checks = [Check(o.case.name, o.error, o.effect if o.case.edits else 1.0) for o in report.outcomes]
    checks += [Check(f"{o.case.name}, {p}", e) for o in report.outcomes for p, e in o.value_errors.items()]
    return Proof(architecture_of(folder / tiny.name), "HF Transformers", sorted(report.layers), checks)


def prove(tiny: TinyModel, folder: Path, reference: ReferenceProcess) -> Proof:
    """Prove a row by parity with HF Transformers if possible, otherwise by identities inside vLLM."""
    if tiny.is_known_to_hf and tiny.no_parity is None:
        return prove_against_hf(tiny, folder, reference)
    return prove_by_identities(tiny, folder, reference)


def prove_by_identities(tiny: TinyModel, folder: Path, reference: ReferenceProcess) -> Proof:
    """Prove a row by identities inside vLLM, on HF's weights if HF has the model, otherwise on random ones."""
    if tiny.is_known_to_hf:
        path = reference.save(tiny.name, folder)
        return _by_identities(tiny, path, {"enable_prefix_caching": False}, reference)
    path = save_config(tiny, folder)
    with random_weights(tiny) as settings:
        return _by_identities(tiny, path, settings, None)


def _by_identities(tiny: TinyModel, path: Path, settings: dict[str, Any], reference: ReferenceProcess | None) -> Proof:
    tiny = dataclasses.replace(tiny, engine={**(tiny.engine or {}), **settings})
    with steered_engine(tiny, path, "eager", supported_branches(tiny)) as llm:
        checks = check_identities(tiny, llm)
        far = None if reference is None else _distance_from_hf(tiny, llm, reference)
        return Proof(architecture_of(path), "identities inside vLLM", sorted(layer_classes(llm)), checks, far)


def _distance_from_hf(tiny: TinyModel, llm: Any, reference: ReferenceProcess) -> float:
    """Return the mean relative distance of the captured rows of a plain request from HF's."""
    stream_points = [point for point in STREAM_FIELDS if point not in tiny.refused]
    streams = generate(llm, [Case("plain", PROMPTS[0])], stream_points, new_tokens=1)[0].streams
    trace = reference.traces(tiny.name, [(PROMPTS[0], len(PROMPTS[0]), ())])[0]
    far = [
        np.linalg.norm(streams[point] - getattr(trace, STREAM_FIELDS[point]), axis=-1)
        / np.linalg.norm(getattr(trace, STREAM_FIELDS[point]), axis=-1)
        for point in stream_points
    ]
    return float(np.mean(far))


def architecture_of(path: Path) -> str:
    """Return the architecture that the model at ``path`` names."""
    architecture: str = json.loads((path / "config.json").read_text())["architectures"][0]
    return architecture

# SPDX-License-Identifier: Apache-2.0
"""Results in benchmarks/results, with the decision whether a figure is of the present code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pages import RESULTS

from benchmarks.build import builds_in, digests, is_current, joint_digest
from benchmarks.cost import first_token, per_token
from benchmarks.groups import CONTROL

NOW = digests()
_STEERED = ("one site", "all sites", "own program each")


def read(name: str) -> dict[str, Any]:
    """Return a result. Ratios of costs are computed from the raw times, because older results differ."""
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    if name.startswith("gpu-cost-"):
        for found in (each for by_batch in result["variants"].values() for each in by_batch.values()):
            if "first token" in found:
                found["first token"] = first_token(found["raw"], found.get("engines", 1))
            if "per token" in found:
                found["median per token"] = found.get("median per token", found["per token"])
                found["per token"] = per_token(found["raw"], found["lengths"], found.get("engines", 1))
    return result


def names(pattern: str) -> list[str]:
    return sorted(path.name for path in RESULTS.glob(pattern))


def kind_of(variant: str) -> str:
    """Return the kind of figure (`benchmarks.build.DEPENDS_ON`) of a variant of ``benchmarks/variants.py``."""
    if variant in ("idle", CONTROL):
        return "idle steps"
    return "steered steps" if variant in _STEERED else "captured steps"


def current(kind: str, result: object) -> bool:
    """Return whether a figure of this kind in a result is of the present code."""
    return is_current(kind, builds_in(result), NOW)


Fits = Callable[[str, object], bool]
"""Whether a figure of a kind in a result may be shown: `current` or `of_any_code`."""


def of_any_code(kind: str, result: object) -> bool:
    """Return True: figures of earlier builds may be shown, too."""
    return True


def date_of(result: Mapping[str, Any]) -> str:
    return str(result.get("environment", {}).get("date") or "")


def code_of(kind: str, result: Mapping[str, Any]) -> str:
    """Return the commit of a result, or the digest of the parts that the kind of figure depends on."""
    environment = result["environment"]
    return str(environment.get("commit") or joint_digest(kind, environment["build"]))


def machine_of(result: Mapping[str, Any]) -> str:
    """Return the GPU, without its maker and memory, or "CPU"."""
    environment = result["environment"]
    device = environment.get("gpu") or environment.get("device") or "CPU"
    return str(device).removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")


class Cost(NamedTuple):
    """Ratios to stock vLLM of one variant and batch, with the result that has them."""

    name: str
    result: dict[str, Any]
    variant: str
    batch: str
    figures: Mapping[str, Any]


def costs() -> Iterator[Cost]:
    """Yield the cells of all results of ``benchmarks/cost.py``."""
    for name in names("gpu-cost-*.json"):
        result = read(name)
        for variant, by_batch in result["variants"].items():
            for batch, found in by_batch.items():
                yield Cost(name, result, variant, batch, found)


def _rank(cost: Cost) -> tuple[str, float]:
    """Return the rank of a cell: the newest date counts, then the narrowest spread of its pairs."""
    low, high = cost.figures.get("spread", (0.0, math.inf))
    return date_of(cost.result), low - high


def newest_costs(shape: str, variant: str, tensor_parallel: int = 1, fits: Fits = current) -> dict[str, Cost]:
    """Return the most recent cells, by batch in numeric order; of one date, those with the narrowest spread."""
    found = {
        cost.batch: cost
        for cost in sorted(costs(), key=_rank)
        if (cost.result["shape"], cost.variant, cost.result["tensor_parallel"]) == (shape, variant, tensor_parallel)
        and fits(kind_of(variant), cost.result)
    }
    return {batch: found[batch] for batch in sorted(found, key=lambda batch: (not batch.isdigit(), len(batch), batch))}

# SPDX-License-Identifier: Apache-2.0
"""Field names and answer of ``POST /v1/patch_sweep``, an interface of another project for the same studies."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.patching.answer import number, numbers
from vllm_steer.patching.axes import align
from vllm_steer.patching.result import PatchingResult
from vllm_steer.patching.runner import Runner
from vllm_steer.patching.study import PatchingStudy
from vllm_steer.request.scalars import closest, is_integer, shown
from vllm_steer.server.studies.job import Results

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "clean": "clean_prompt",
        "corrupt": "prompt",
        "answer": "answer_token",
        "foil": "foil_token",
        "points": "hooks",
        "strength": "alpha",
    }
)
"""Their names of our fields."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {"source_run": "runs are not stored on the server; give clean_prompt, which is run and captured with the sweep"}
)
METRICS = ("logprob", "logit_diff", "recovered")
FIELDS = (
    "model", "prompt", "clean_prompt", "hook", "hooks", "layers", "positions", "alpha", "answer_token", "foil_token",
    "metric", "stream", "clean_baseline",
)  # fmt: skip


def start(body: Mapping[str, Any], runner: Runner) -> Results:
    """Check a sweep and return its results as they come.

    Raises:
        SteeringError: A field is missing, invalid, or not served; its field is the path in ``body``.
    """
    for name in body:
        if name in REFUSED and body[name] is not None:
            raise SteeringError(name, f"is not served: {REFUSED[name]}")
        if name not in FIELDS and name not in REFUSED:
            hint = closest(str(name), FIELDS)
            advice = f"did you mean {hint}?" if hint else f"use {', '.join(FIELDS)}"
            raise SteeringError(shown(name).strip("'"), f"unknown field; {advice}")
    given = {name: value for name, value in body.items() if value is not None}
    for name in ("prompt", "clean_prompt", "answer_token"):
        if name not in given:
            raise SteeringError(name, "is missing")
    if given.get("clean_baseline", True) is not True:
        raise SteeringError("clean_baseline", "the clean run is always measured; omit the field, or use true")
    if "hook" in given and "hooks" in given:
        raise SteeringError("hook", "cannot be combined with hooks; use one of them")
    metric = given.get("metric", "logit_diff" if "foil_token" in given else "logprob")
    if metric not in METRICS:
        raise SteeringError("metric", f"{shown(metric)} is not a metric; use one of {', '.join(METRICS)}")
    answer, foil = (
        [token] if is_integer(token) else token for token in (given["answer_token"], given.get("foil_token"))
    )
    try:
        study = PatchingStudy(runner, clean=given["clean_prompt"], corrupt=given["prompt"], answer=answer, foil=foil)
        yield from study.stream(
            points=given.get("hooks", given.get("hook", "post_block")),
            layers=given.get("layers", "all"),
            positions=given.get("positions", "all_prompt"),
            strength=given.get("alpha", 1.0),
            metric=metric,
        )
    except SteeringError as error:
        raise renamed(error, "hook" if "hook" in given else "hooks") from None


def renamed(error: SteeringError, points: str) -> SteeringError:
    """Return ``error`` with their name of its field."""
    for ours, theirs in RENAMED.items():
        if error.field == ours or error.field.startswith((f"{ours}[", f"{ours}.")):
            name = points if ours == "points" else theirs
            error.field = name + error.field.removeprefix(ours)
            error.args = (error.field, error.problem)
    return error


def summary(result: PatchingResult) -> dict[str, Any]:
    """Return the answer in their form; a cell that failed is null, with its reason in ``failed``."""
    info = result.info
    pair = info.pairs[0]
    hook = info.points[0]
    grids = {point: result.grid(point) for point in info.points}
    aligned = align(pair.source, pair.base)
    _, clean, corrupt = result.unpatched_values()
    return {
        "layers": [row[0] if row[1] == row[0] + 1 else list(row) for row in info.row_layers],
        "positions": [span[0] if span[1] == span[0] + 1 else list(span) for span in pair.columns],
        "hook": hook,
        "metric": info.metric,
        "grid": numbers(grids[hook]),
        "clean": number(clean),
        "corrupt": number(corrupt),
        "argmax": _argmax(result, hook),
        "skipped": list(pair.skipped),
        "alignment": [[there, here] for here, there in aligned.source_of.items()],
        "noise_floor": number(result.noise_floor()),
        "hook_grids": {point: numbers(grid) for point, grid in grids.items()},
        "failed": result.failed(),
    }


def _argmax(result: PatchingResult, hook: str) -> dict[str, Any] | None:
    """Return the cell with the largest value; None if all have failed."""
    grid = result.grid(hook)
    if np.isnan(grid).all():
        return None
    row, column = (int(i) for i in np.unravel_index(np.nanargmax(grid), grid.shape))
    return {
        "layer": result.info.row_layers[row][0],
        "position": result.info.pairs[0].columns[column][0],
        "value": number(float(grid[row, column])),
    }

# SPDX-License-Identifier: Apache-2.0
"""Results of a sweep as JSON types, for HTTP answers and events. Missing numbers are None."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from vllm_steer.patching.file import encode
from vllm_steer.patching.result import PatchingResult
from vllm_steer.patching.sweep import Batch


def start_event(result: PatchingResult) -> dict[str, Any]:
    """Return the event ``start``: the description of the sweep, before its first cell."""
    return {"event": "start", **_description(result), "cells": int(result.cells[..., 0].size)}


def cell_events(result: PatchingResult, batch: Batch) -> Iterator[dict[str, Any]]:
    """Return one event ``cell`` for each cell of a batch."""
    info = result.info
    for (case, point, row, column), measured in batch.cells.items():
        yield {
            "event": "cell",
            "pair": case // info.draws,
            "draw": case % info.draws,
            **result.place(point, row, column),
            "row": row,
            "column": column,
            "value": number(result.cell_value(case, measured.measures)),
            "error": measured.error,
        }


def summary(result: PatchingResult, *, with_file: bool = False) -> dict[str, Any]:
    """Return the grids of a finished sweep, with everything that they are to be compared with."""
    points = result.info.points
    name, clean, corrupt = result.unpatched_values()
    document = {
        **_description(result),
        "grids": {point: numbers(result.grid(point)) for point in points},
        "effects": {point: numbers(result.effect(point)) for point in points},
        "below_floor": {point: result.below_floor(point).tolist() for point in points},
        "unpatched": {"metric": name, "clean": number(clean), "corrupt": number(corrupt)},
        "random_effects": {
            point: numbers(result.effect(point, random=True)) for point in points if result.info.random_control
        },
        "too_close": result.too_close() if result.info.metric == "recovered" else [],
        "noise_floor": number(result.noise_floor()),
        "control_error": number(result.control()),
        "failed": result.failed(),
        "cached_tokens": result.cached_tokens,
        "prompt_tokens": result.prompt_tokens,
    }
    return {**document, "file": base64.b64encode(encode(result)).decode("ascii")} if with_file else document


def _description(result: PatchingResult) -> dict[str, Any]:
    info = result.info
    return {
        "object": "patching_study",
        "digest": info.digest,
        "model": info.model,
        "direction": info.direction,
        "corruption": info.corruption,
        "metric": info.metric,
        "points": list(info.points),
        "layers": list(info.row_names),
        "positions": list(info.column_names),
        "pairs": len(info.pairs),
        "draws": info.draws,
        "skipped": [list(pair.skipped) for pair in info.pairs],
    }


def number(value: float) -> float | None:
    """Return a number, or None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def numbers(grid: np.ndarray[Any, Any]) -> list[list[float | None]]:
    """Return a grid as lists."""
    return [[number(value) for value in row] for row in grid.tolist()]

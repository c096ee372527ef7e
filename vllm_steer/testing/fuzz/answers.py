# SPDX-License-Identifier: Apache-2.0
"""Answers of requests, assembled from complete outputs or from the deltas of a stream."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from vllm_steer.capture.results import Site

Rows: TypeAlias = Mapping[Site, tuple[tuple[int, ...], torch.Tensor]]
"""Positions and float32 rows ``[positions, H]`` by site, and the values of readouts by name and :data:`READOUT`."""
READOUT = -1
"""Stands for the layer of a readout's values."""
TRACE = ("steering_trace", READOUT)
"""Key of the factors of gates and of live strengths."""
_VALUE = re.compile(r" is \S+")


@dataclass(frozen=True)
class Sample:
    """One sample of a request. ``top[i]`` maps the likeliest tokens of generated token ``i`` to log-probabilities."""

    tokens: tuple[int, ...] = ()
    top: tuple[Mapping[int, float], ...] = ()
    finish_reason: str | None = None
    stop: str | None = None
    """Readout and position of a stop."""
    status: str | None = None
    error: str | None = None
    rows: Rows = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """All samples of a request. ``refused`` is the reason for a refusal, or None."""

    samples: tuple[Sample, ...] = ()
    refused: str | None = None
    aborted: bool = False
    cached_tokens: int = 0


class AnswerCollector:
    """Collects the outputs of running requests; streamed outputs are deltas."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[int, Sample]] = {}

    def add(self, output: Any, streamed: bool) -> Answer | None:
        """Add a ``RequestOutput``; return the answer if the request has finished, else None."""
        samples = self._samples.setdefault(output.request_id, {})
        for each in output.outputs:
            new = _sample(each, streamed)
            samples[each.index] = _concatenate(samples.get(each.index, Sample()), new) if streamed else new
        if not output.finished:
            return None
        del self._samples[output.request_id]
        return Answer(tuple(samples[index] for index in sorted(samples)), cached_tokens=output.num_cached_tokens or 0)


def _sample(each: Any, streamed: bool) -> Sample:
    results = getattr(each, "capture_results", None)
    result = None if results is None else results["memory"]
    new = (getattr(each, "capture_rows", None) or {}).get("memory") if streamed else None
    rows: Rows = {}
    if new is not None:
        rows = {site: (tuple(found.positions.tolist()), found.rows.float()) for site, found in new.items()}
    elif result is not None:
        rows = {site: (tuple(result.positions(*site).tolist()), result.tensor(*site).float()) for site in result.sites}
    for name, readout in (getattr(each, "readouts", None) or {}).items():
        # Values only: the order of tokens with equal log-probabilities is not defined.
        values = torch.from_numpy(readout.values).float()
        values = values.unsqueeze(1) if values.ndim == 1 else values.flatten(1)
        # First, as in a stream, whose reduced rows come at its end.
        rows = {(name, READOUT): (tuple(readout.positions.tolist()), values), **rows}
    trace = getattr(each, "steering_trace", None)
    if trace is not None:
        gates = torch.from_numpy(np.concatenate([trace.gates, *(v[:, None] for v in trace.live.values())], axis=1))
        rows = {TRACE: (tuple(trace.positions.tolist()), gates.float()), **rows}
    return Sample(
        tokens=tuple(each.token_ids),
        top=tuple({token: entry.logprob for token, entry in step.items()} for step in each.logprobs or ()),
        finish_reason=each.finish_reason,
        # The value that the readout had is subject to rounding.
        stop=_VALUE.sub("", each.stop_reason) if isinstance(each.stop_reason, str) else None,
        status=None if result is None else result.status,
        error=None if result is None else result.error,
        rows=rows,
    )


def _concatenate(before: Sample, new: Sample) -> Sample:
    rows = dict(before.rows)
    for site, (positions, values) in new.rows.items():
        old_positions, old_values = rows.get(site, ((), values[:0]))
        rows[site] = ((*old_positions, *positions), torch.cat((old_values, values)))
    return replace(new, tokens=before.tokens + new.tokens, top=before.top + new.top, rows=rows)

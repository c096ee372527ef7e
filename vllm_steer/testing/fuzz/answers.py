# SPDX-License-Identifier: Apache-2.0
"""What a request returned, put together from whole outputs or from the pieces of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from vllm_steer.capture.results import Site

Rows: TypeAlias = Mapping[Site, tuple[tuple[int, ...], torch.Tensor]]
"""Positions and float32 rows ``[positions, H]`` by site."""


@dataclass(frozen=True)
class Sample:
    """One sample of one request. ``top[i]`` are the log-probabilities of the likeliest tokens at place i."""

    tokens: tuple[int, ...] = ()
    top: tuple[Mapping[int, float], ...] = ()
    finish_reason: str | None = None
    status: str | None = None
    error: str | None = None
    rows: Rows = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """All of one request. ``refused``: why it was not taken at all. ``aborted``: it was ended on the way."""

    samples: tuple[Sample, ...] = ()
    refused: str | None = None
    aborted: bool = False
    cached_tokens: int = 0


class Gathering:
    """The outputs of requests that are still running: a stream has a piece of its sample in each."""

    def __init__(self) -> None:
        self._pieces: dict[str, dict[int, Sample]] = {}

    def take(self, output: Any, streamed: bool) -> Answer | None:
        """Take in one ``RequestOutput``; the whole answer with the last one."""
        pieces = self._pieces.setdefault(output.request_id, {})
        for each in output.outputs:
            piece = _sample(each, streamed)
            pieces[each.index] = _joined(pieces.get(each.index, Sample()), piece) if streamed else piece
        if not output.finished:
            return None
        samples = tuple(pieces[index] for index in sorted(pieces))
        del self._pieces[output.request_id]
        return Answer(samples, cached_tokens=output.num_cached_tokens or 0)


def _sample(each: Any, streamed: bool) -> Sample:
    results = getattr(each, "capture_results", None)
    result = None if results is None else results["memory"]
    new = (getattr(each, "capture_rows", None) or {}).get("memory") if streamed else None
    rows: Rows = {}
    if new is not None:
        rows = {site: (tuple(found.positions.tolist()), found.rows.float()) for site, found in new.items()}
    elif result is not None:
        rows = {site: (tuple(result.positions(*site).tolist()), result.tensor(*site).float()) for site in result.sites}
    return Sample(
        tokens=tuple(each.token_ids),
        top=tuple({token: entry.logprob for token, entry in step.items()} for step in each.logprobs or ()),
        finish_reason=each.finish_reason,
        status=None if result is None else result.status,
        error=None if result is None else result.error,
        rows=rows,
    )


def _joined(before: Sample, new: Sample) -> Sample:
    rows = dict(before.rows)
    for site, (positions, values) in new.rows.items():
        old_positions, old_values = rows.get(site, ((), values[:0]))
        rows[site] = ((*old_positions, *positions), torch.cat((old_values, values)))
    return replace(new, tokens=before.tokens + new.tokens, top=before.top + new.top, rows=rows)

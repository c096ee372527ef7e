# SPDX-License-Identifier: Apache-2.0
"""From a program and a prompt's length to segments of positions, each with one row of instructions.

The selectors of a request cut its positions ``0, 1, 2, ...`` into segments; within one segment the same edits apply
to every token. Scheduler and workers resolve the same bytes with the same function, so their books agree.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from vllm_steer.points import POINT_NAMES
from vllm_steer.program.program import Program, Step

N_POINTS = len(POINT_NAMES)
PRE_ATTN = POINT_NAMES.index("pre_attn")


@dataclass(frozen=True)
class Instruction:
    """One operation at one site, as it stands in the device tables."""

    site: int
    code: int
    vector: bytes
    strength: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """The edits of one class of tokens; equal content has an equal digest, whatever request it came from."""

    digest: bytes
    steps: tuple[Step, ...]
    vectors: tuple[bytes, ...]
    instruction_count: int
    num_layers: int

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions, in order of application within each site. A site is ``3 * layer + point``."""
        return tuple(
            Instruction(layer * N_POINTS + step.point, step.code, vector, step.strength, step.low, step.high)
            for step, vector in zip(self.steps, self.vectors, strict=True)
            for layer in _layers(step, self.num_layers)
        )


@dataclass(frozen=True)
class Segment:
    """Positions from ``start`` up to the next segment's start; ``row`` None means that nothing is edited there."""

    start: int
    row: Row | None
    kv_digest: bytes | None


@dataclass(frozen=True)
class Resolved:
    """A request's segments: starts ascend from 0, and no two neighbours have the same row."""

    segments: tuple[Segment, ...]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The distinct rows, in order of first use."""
        return tuple({s.row.digest: s.row for s in self.segments if s.row is not None}.values())


def resolve(program: Program, prompt_len: int, num_layers: int) -> Resolved:
    """Segments of ``program`` for a prompt of ``prompt_len`` tokens on a model of ``num_layers`` decoder layers.

    Raises :class:`~vllm_steer.errors.SteeringError` where a selector counts back beyond the prompt's first token.
    """
    spans = [step.selector.intervals(prompt_len) for step in program.steps]
    starts = sorted({0}.union(*({bound for span in spans_ for bound in span} for spans_ in spans)))
    segments: list[Segment] = []
    for start in starts:
        active = tuple(
            step
            for step, spans_ in zip(program.steps, spans, strict=True)
            if any(low <= start < high for low, high in spans_)
        )
        row = _row(active, program, num_layers) if active else None
        if segments and _digest_of(segments[-1].row) == _digest_of(row):
            continue
        segments.append(Segment(start, row, _kv_digest(active, num_layers)))
    if len(segments) > 1 and segments[-1].start >= 2**31 - 1:
        segments.pop()
    return Resolved(tuple(segments))


def _digest_of(row: Row | None) -> bytes | None:
    return None if row is None else row.digest


def _layers(step: Step, num_layers: int) -> range | tuple[int, ...]:
    return step.layers or range(num_layers)


def _row(steps: tuple[Step, ...], program: Program, num_layers: int) -> Row:
    digest = hashlib.blake2b(b"".join(step.digest for step in steps), digest_size=16).digest()
    count = sum(len(_layers(step, num_layers)) for step in steps)
    return Row(digest, steps, tuple(program.digests[step.vector] for step in steps), count, num_layers)


def _kv_digest(steps: tuple[Step, ...], num_layers: int) -> bytes | None:
    """Digest of the edits that can change a token's keys and values; None where there is none.

    The last layer's keys and values come from its ``pre_attn`` stream, so its later points change no cache entry.
    """
    last = num_layers - 1
    parts = [
        step.digest
        for step in steps
        if step.point == PRE_ATTN or any(layer < last for layer in _layers(step, num_layers))
    ]
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest() if parts else None

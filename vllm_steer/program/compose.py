# SPDX-License-Identifier: Apache-2.0
"""Programs out of programs: one after the other, and at another strength."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.program.program import NO_PROJECTION, CompiledEdit, CompiledRead, Program, compile_program
from vllm_steer.spec.scalars import read_number


def join(programs: Sequence[Program]) -> Program:
    """All edits of ``programs``, in that order, and all their reads; vectors that they share appear once.

    Raises:
        SteeringError: their vectors differ in width.
    """
    widths = {program.width for program in programs if program.vectors}
    if len(widths) > 1:
        raise SteeringError(
            "vector", f"has another width than the rest: {', '.join(map(str, sorted(widths)))} meet in one request"
        )
    vectors: dict[bytes, tuple[int, memoryview]] = {}
    steps: list[CompiledEdit] = []
    reads: dict[bytes, CompiledRead] = {}
    projections: dict[tuple[int, ...], int] = {}
    for program in programs:
        for digest, data in zip(program.digests, program.vectors, strict=True):
            vectors.setdefault(digest, (len(vectors), data))
        steps += [
            msgspec.structs.replace(step, vector=vectors[program.digests[step.vector]][0]) for step in program.steps
        ]
        for read in program.reads:
            if read.projection != NO_PROJECTION:
                places = tuple(vectors[digest][0] for digest in program.directions(read.projection))
                read = msgspec.structs.replace(read, projection=projections.setdefault(places, len(projections)))
            reads[msgspec.msgpack.encode(read)] = read
    return msgspec.structs.replace(
        compile_program([]),
        width=max(widths, default=0),
        steps=tuple(steps),
        reads=tuple(reads.values()),
        digests=tuple(vectors),
        vectors=tuple(data for _, data in vectors.values()),
        projections=tuple(projections),
    )


def scaled(program: Program, scale: float) -> Program:
    """``program`` with the strength of every edit multiplied; at 0 no edit is left.

    Raises:
        SteeringError: a strength would be beyond float32.
    """
    if scale == 1.0:
        return program
    if scale == 0.0:
        return msgspec.structs.replace(program, width=0, steps=(), digests=(), vectors=())
    steps = (
        step.with_strength(read_number(step.strength * scale, "scale"), program.digests[step.vector])
        for step in program.steps
    )
    return msgspec.structs.replace(program, steps=tuple(step for step in steps if step.strength))

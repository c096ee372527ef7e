# SPDX-License-Identifier: Apache-2.0
"""Composition of programs: concatenation and scaling."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_steer.program.compiled_capture import NO_PROJECTION, CompiledCapture
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.compiler import compile_program
from vllm_steer.program.program import Program
from vllm_steer.program.readouts import CompiledReadout
from vllm_steer.program.vector_table import VectorTable
from vllm_steer.request.scalars import read_number, zero_if_underflows


def join(programs: Sequence[Program]) -> Program:
    """Concatenate programs; shared vectors and equal captures appear once.

    Raises:
        SteeringError: the programs' vectors differ in width.
    """
    vectors = VectorTable()
    edits: list[CompiledEdit] = []
    captures: dict[bytes, tuple[CompiledCapture, str]] = {}
    projections: dict[tuple[int, ...], int] = {}
    readouts: list[CompiledReadout] = []
    for program in programs:
        source = program.vector_source if program.vectors else ""
        pairs = zip(program.vectors, program.digests, strict=True)
        places = [vectors.add(data, source, digest) for data, digest in pairs]
        edits += [edit.moved(places) for edit in program.edits]
        for number, capture in enumerate(program.captures):
            if capture.projection != NO_PROJECTION:
                indices = tuple(places[index] for index in program.projections[capture.projection])
                capture = msgspec.structs.replace(capture, projection=projections.setdefault(indices, len(projections)))
            captures.setdefault(msgspec.msgpack.encode(capture), (capture, program.capture_source(number)))
        # Only the request itself has readouts, so the indices of its conditions stay valid.
        readouts += [
            msgspec.structs.replace(readout, vectors=tuple(places[index] for index in readout.vectors))
            for readout in program.readouts
        ]
    sources: tuple[str, ...] = ()
    if any(program.sources for program in programs):
        edit_sources = (program.edit_source(i) for program in programs for i in range(len(program.edits)))
        sources = (*edit_sources, *(source for _, source in captures.values()))
    return msgspec.structs.replace(
        compile_program([]),
        edits=tuple(edits),
        captures=tuple(capture for capture, _ in captures.values()),
        projections=tuple(projections),
        sources=sources,
        readouts=tuple(readouts),
        stops=tuple(stop for program in programs for stop in program.stops),
        **vectors.fields(),
    )


def with_source(program: Program, source: str) -> Program:
    """Return the program with ``source`` as the path of all its edits and captures."""
    return msgspec.structs.replace(program, sources=(source,) * (len(program.edits) + len(program.captures)))


def scaled(program: Program, scale: float) -> Program:
    """Return the program with the strength of every edit multiplied by ``scale``; 0 removes all edits.

    Raises:
        SteeringError: a strength would overflow float32.
    """
    if scale == 1.0:
        return program
    if scale == 0.0:
        sources = program.sources[len(program.edits) :]
        return msgspec.structs.replace(program, width=0, edits=(), digests=(), vectors=(), sources=sources)
    strengths = [zero_if_underflows(read_number(edit.strength * scale, "scale")) for edit in program.edits]
    edits = [edit.with_strength(each, program.digests) for edit, each in zip(program.edits, strengths, strict=True)]
    kept = [number for number, edit in enumerate(edits) if edit.strength]
    sources = program.sources and (*(program.sources[i] for i in kept), *program.sources[len(edits) :])
    return msgspec.structs.replace(program, edits=tuple(edits[i] for i in kept), sources=sources)

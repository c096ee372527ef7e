# SPDX-License-Identifier: Apache-2.0
"""Composition of programs: concatenation and scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.compiler import compile_mlp, compile_program
from vllm_steer.program.dynamic import TOKEN, CompiledReadout, CompiledStop
from vllm_steer.program.program import NO_PROJECTION, CompiledCapture, Program
from vllm_steer.spec import Projection
from vllm_steer.spec.condition import condition_source
from vllm_steer.spec.mlp import HAS_HIDDEN_LAYER, NO_COSINE, TOO_LATE, MlpProbe
from vllm_steer.spec.scalars import read_number


def join(programs: Sequence[Program]) -> Program:
    """Concatenate programs; shared vectors and equal captures appear once.

    Raises:
        SteeringError: the programs' vectors differ in width.
    """
    wide = [program for program in programs if program.vectors]
    for program in wide:
        if program.width != wide[0].width:
            raise SteeringError(
                program.vector_source,
                f"has a vector of width {program.width}, but {wide[0].vector_source} has width {wide[0].width}; "
                "all vectors have the model's hidden size",
            )
    vectors: dict[bytes, tuple[int, memoryview]] = {}
    edits: list[CompiledEdit] = []
    captures: dict[bytes, tuple[CompiledCapture, str]] = {}
    projections: dict[tuple[int, ...], int] = {}
    for program in programs:
        for digest, data in zip(program.digests, program.vectors, strict=True):
            vectors.setdefault(digest, (len(vectors), data))
        edit_places = [vectors[digest][0] for digest in program.digests]
        edits += [edit.moved(edit_places) for edit in program.edits]
        for number, capture in enumerate(program.captures):
            if capture.projection != NO_PROJECTION:
                indices = tuple(vectors[digest][0] for digest in program.directions(capture.projection))
                capture = msgspec.structs.replace(capture, projection=projections.setdefault(indices, len(projections)))
            captures.setdefault(msgspec.msgpack.encode(capture), (capture, program.capture_source(number)))
    readouts: list[CompiledReadout] = []
    stops: list[CompiledStop] = []
    for program in programs:
        # Only the request itself has readouts, so the indices of its conditions stay valid.
        places = [vectors[digest][0] for digest in program.digests]
        readouts += [
            msgspec.structs.replace(readout, vectors=tuple(places[index] for index in readout.vectors))
            for readout in program.readouts
        ]
        stops += program.stops
    sources: tuple[str, ...] = ()
    if any(program.sources for program in programs):
        edit_sources = (program.edit_source(i) for program in programs for i in range(len(program.edits)))
        sources = (*edit_sources, *(source for _, source in captures.values()))
    return msgspec.structs.replace(
        compile_program([]),
        width=wide[0].width if wide else 0,
        edits=tuple(edits),
        captures=tuple(capture for capture, _ in captures.values()),
        digests=tuple(vectors),
        vectors=tuple(data for _, data in vectors.values()),
        projections=tuple(projections),
        sources=sources,
        readouts=tuple(readouts),
        stops=tuple(stops),
    )


FindProbes = Callable[[tuple[str, ...], str], Projection | MlpProbe]


def with_probes(program: Program, find: FindProbes) -> Program:
    """Return the program with the probes of modules that its readouts name replaced by their content.

    Args:
        program: The program.
        find: Returns the directions of some probes, or the probe with a hidden layer that a single name refers to. It
            gets the names and the path of the field.

    Raises:
        SteeringError: The directions differ in width from other vectors of the request, or a probe with a hidden layer
            cannot be used as the request does.
    """
    vectors = dict(zip(program.digests, program.vectors, strict=True))
    width = program.width if program.vectors else 0
    readouts = []
    for number, readout in enumerate(program.readouts):
        if readout.probes:
            field = f"{program.readout_source(number)}.{'probe' if readout.scalar else 'projections'}"
            projection = find(readout.probes, field)
            if isinstance(projection, MlpProbe):
                _check_mlp(program, number, field)
                readout = msgspec.structs.replace(readout, mlp=compile_mlp(projection))
                projection = projection.weights
            own = projection.directions.shape[1]
            if width not in (0, own):
                raise SteeringError(field, f"has width {own}, but other vectors of the request have width {width}")
            width = own
            for digest, data in zip(projection.digests, projection.vectors, strict=True):
                vectors.setdefault(digest, memoryview(data))
            places = {digest: place for place, digest in enumerate(vectors)}
            readout = msgspec.structs.replace(
                readout, probes=(), vectors=tuple(places[digest] for digest in projection.digests)
            )
        readouts.append(readout)
    return msgspec.structs.replace(
        program, width=width, digests=tuple(vectors), vectors=tuple(vectors.values()), readouts=tuple(readouts)
    )


def _check_mlp(program: Program, number: int, field: str) -> None:
    """Raise :class:`SteeringError` unless the readout with that index may have a hidden layer."""
    readout = program.readouts[number]
    if not readout.scalar:
        raise SteeringError(field, f"{', '.join(readout.probes)} {HAS_HIDDEN_LAYER}")
    if readout.cosine:
        raise SteeringError(f"{program.readout_source(number)}.cosine", NO_COSINE)
    for i, edit in enumerate(program.edits):
        for j, condition in enumerate(edit.when):
            if condition.readout == number and condition.kind == TOKEN:
                source = condition_source(program.edit_source(i), j, len(edit.when))
                raise SteeringError(f"{source}.window", TOO_LATE)


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
    edits = [edit.with_strength(read_number(edit.strength * scale, "scale"), program.digests) for edit in program.edits]
    # A product may underflow to 0.
    kept = [number for number, edit in enumerate(edits) if edit.strength]
    sources = program.sources and (*(program.sources[i] for i in kept), *program.sources[len(edits) :])
    return msgspec.structs.replace(program, edits=tuple(edits[i] for i in kept), sources=sources)

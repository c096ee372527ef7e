# SPDX-License-Identifier: Apache-2.0
"""Composition of programs: concatenation and scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.compiler import check_order, compile_mlp, compile_program
from vllm_steer.program.dynamic import TOKEN, CompiledReadout, CompiledStop
from vllm_steer.program.program import NO_PROJECTION, CompiledCapture, Program
from vllm_steer.request import Projection
from vllm_steer.request.condition import condition_source
from vllm_steer.request.hidden_layer import NO_COSINE, TOO_LATE, HiddenLayer
from vllm_steer.request.probe import Probe
from vllm_steer.request.scalars import read_number


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


FindProbe = Callable[[str, str], Probe]


def with_probes(program: Program, find: FindProbe) -> Program:
    """Return the program with the probes of modules that its readouts name replaced by their content.

    Args:
        program: The program.
        find: Returns a probe. It gets the name and the path of the field.

    Raises:
        SteeringError: The weights differ in width from other vectors of the request, the request contradicts what is
            registered with a probe, or a probe cannot be used as the request does.
    """
    vectors = dict(zip(program.digests, program.vectors, strict=True))
    width = program.width if program.vectors else 0
    readouts = []
    for number, readout in enumerate(program.readouts):
        if readout.probes:
            source = program.readout_source(number)
            field = f"{source}.{'probe' if readout.scalar else 'projections'}"
            if readout.scalar:
                name = readout.probes[0]
                probe = find(name, f"{field}[0]")
                readout = _with_reading(readout, probe, name, source)
                if isinstance(probe.weights, HiddenLayer):
                    _check_mlp(program, number)
                    readout = msgspec.structs.replace(readout, mlp=compile_mlp(probe.weights))
                    projection = probe.weights.weights
                else:
                    projection = Projection([probe.weights], field)
            else:
                projection = _projection(readout, find, source, field)
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
    filled = msgspec.structs.replace(
        program, width=width, digests=tuple(vectors), vectors=tuple(vectors.values()), readouts=tuple(readouts)
    )
    check_order(filled)
    return filled


def _with_reading(readout: CompiledReadout, probe: Probe, name: str, source: str) -> CompiledReadout:
    """Return a readout with the bias, sigmoid, point and layer that are registered with its probe."""
    point = POINT_NAMES[readout.point]
    given = {"bias": readout.bias, "sigmoid": readout.sigmoid, "point": point, "layer": readout.layer}
    probe.check(name, {key: value for key, value in given.items() if key not in readout.omitted}, source)
    for key in ("point", "layer"):
        if key in readout.omitted and key not in probe.reading:
            raise SteeringError(f"{source}.{key}", f"is missing; the probe {name} was registered without it")
    if readout.cosine and (probe.bias or probe.sigmoid):
        problem = f"cannot be combined with the probe {name}, which was registered with a bias or a sigmoid; omit it"
        raise SteeringError(f"{source}.cosine", problem)
    whole = given | probe.reading
    return msgspec.structs.replace(
        readout,
        bias=whole["bias"],
        sigmoid=whole["sigmoid"],
        point=POINT_NAMES.index(whole["point"]),
        layer=whole["layer"],
        omitted=(),
    )


def _projection(readout: CompiledReadout, find: FindProbe, source: str, field: str) -> Projection:
    directions = []
    for i, name in enumerate(readout.probes):
        probe = find(name, f"{field}[{i}]")
        probe.check(name, {"point": POINT_NAMES[readout.point], "layer": readout.layer}, source)
        directions.append(probe.projected(name, f"{field}[{i}]"))
    return Projection(directions, field)


def _check_mlp(program: Program, number: int) -> None:
    """Raise :class:`SteeringError` unless the readout with that index may have a hidden layer."""
    readout = program.readouts[number]
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

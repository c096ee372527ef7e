# SPDX-License-Identifier: Apache-2.0
"""Compilation of edits and capture specs to a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.program.compiled_capture import NO_PROJECTION, CompiledCapture
from vllm_steer.program.compiled_edit import WIRE_VERSION, CompiledEdit, CompiledFeature
from vllm_steer.program.compiled_part import compile_parts
from vllm_steer.program.instructions import CODES, UNBOUNDED
from vllm_steer.program.program import ALL_LAYERS, Program
from vllm_steer.program.readouts import CompiledMlp, CompiledReadout
from vllm_steer.program.records import (
    HELD,
    OVER_CODES,
    PREVIOUS_CODES,
    TOKEN,
    WINDOW_CODES,
    CompiledBound,
    CompiledCondition,
    CompiledStop,
)
from vllm_steer.program.vector_table import VectorTable
from vllm_steer.request import (
    KINDS,
    Bound,
    CaptureSpec,
    Condition,
    Edit,
    NamedProjection,
    Projection,
    Readout,
    Selector,
    Stop,
    bytes_of,
)
from vllm_steer.request.condition import condition_source
from vllm_steer.request.matrix import orthonormal_basis
from vllm_steer.request.message_parts import PROMPT_PARTS
from vllm_steer.request.probe import TOO_LATE, HiddenLayer
from vllm_steer.request.scalars import FLOAT32_MAX, closest, zero_if_underflows
from vllm_steer.request.selector import Wire
from vllm_steer.request.sites import Layers
from vllm_steer.request.vector import unit_vector

NO_READOUTS: Mapping[str, Readout] = MappingProxyType({})


def compile_program(
    edits: Sequence[Edit],
    captures: Sequence[CaptureSpec] = (),
    *,
    edit_paths: Sequence[str] = (),
    capture_paths: Sequence[str] = (),
    readouts: Mapping[str, Readout] = NO_READOUTS,
    stops: Sequence[Stop] = (),
) -> Program:
    """Compile edits, capture specs, readouts and stops.

    Edits of strength 0 change nothing. They are left out unless they have a column in the request's records, that is,
    `when`, `live` or a part of the output. Equal captures appear once.

    Args:
        edits: the edits, in the order in which they apply.
        captures: the capture specs.
        edit_paths: path of each edit in the request, for error messages.
        capture_paths: path of each capture spec in the request.
        readouts: the readouts.
        stops: the conditions that end generation.

    Raises:
        SteeringError: directions differ in width from other vectors of the request, or a condition names a readout that
            does not exist, is not a probe or is computed behind the edit.
    """
    paths = edit_paths or ["steering"] * len(edits)
    widths = ((edit.width, path) for edit, path in zip(edits, paths, strict=True) if edit.width)
    vectors = VectorTable(*next(widths, (0, "")))
    numbers = {name: number for number, name in enumerate(readouts)}
    compiled_edits: dict[int, CompiledEdit] = {}
    for number, (edit, path) in enumerate(zip(edits, paths, strict=True)):
        when = tuple(
            _compile_condition(each, edit, readouts, numbers, condition_source(path, i, len(edit.when)))
            for i, each in enumerate(edit.when)
        )
        if strength_of(edit) != 0.0 or edit.when or edit.live or edit.tokens.spans:
            compiled_edits[number] = _compile_edit(edit, vectors, when, path)
    compiled_readouts = tuple(_compile_readout(name, readout, vectors) for name, readout in readouts.items())
    compiled_stops = tuple(_compile_stop(each, readouts, numbers, f"stop_on[{i}]") for i, each in enumerate(stops))
    projections: dict[tuple[int, ...], int] = {}
    compiled_captures: dict[bytes, tuple[CompiledCapture, int]] = {}
    for number, spec in enumerate(captures):
        projection = NO_PROJECTION
        if isinstance(spec.reduce, Projection) and spec.reduce.in_engine:
            source = capture_paths[number] if capture_paths else "capture"
            indices = vectors.add_directions(spec.reduce, f"{source}.reduce.directions")
            projection = projections.setdefault(indices, len(projections))
        for capture in _compile_captures(spec, projection):
            compiled_captures.setdefault(msgspec.msgpack.encode(capture), (capture, number))
    sources: tuple[str, ...] = ()
    if edit_paths or capture_paths:
        sources = (
            *(edit_paths[number] for number in compiled_edits),
            *(capture_paths[number] for _, number in compiled_captures.values()),
        )
    program = Program(
        version=WIRE_VERSION,
        edits=tuple(compiled_edits.values()),
        captures=tuple(capture for capture, _ in compiled_captures.values()),
        projections=tuple(projections),
        sources=sources,
        readouts=compiled_readouts,
        stops=compiled_stops,
        **vectors.fields(),
    )
    check_order(program)
    return program


def check_order(program: Program) -> None:
    """Raise SteeringError if an edit is computed before the readout that decides about the same token.

    Edits and readouts whose sites are not filled in are left out.
    """
    for i, edit in enumerate(program.edits):
        site = (edit.layers[0] if edit.layers else 0, edit.point)
        for j, condition in enumerate(edit.when):
            readout = program.readouts[condition.readout]
            omitted = (*readout.omitted, *(edit.feature.omitted if edit.feature else ()))
            if condition.kind != TOKEN or {"point", "layer"} & set(omitted):
                continue
            if site <= (readout.layer, readout.point):
                raise SteeringError(
                    f"{condition_source(program.edit_source(i), j, len(edit.when))}.window",
                    f"the edit at {POINT_NAMES[edit.point]} of layer {site[0]} is computed before the readout at "
                    f'{POINT_NAMES[readout.point]} of layer {readout.layer}; use the window "previous", or edit later '
                    "sites only",
                )


def _compile_edit(edit: Edit, vectors: VectorTable, when: tuple[CompiledCondition, ...], path: str) -> CompiledEdit:
    vector, coordinates = edit.vector, b""
    indices: tuple[int, ...] = ()
    feature: CompiledFeature | None = None
    low, high = -UNBOUNDED if edit.low is None else edit.low, UNBOUNDED if edit.high is None else edit.high
    if KINDS[edit.kind].needs_direction:
        vector = unit_vector(vector)
    if edit.subspace is not None:
        orthonormal = orthonormal_basis(edit.subspace)
        indices = vectors.add_rows(orthonormal.astype(np.float32), path)
        coordinates = _coordinates(vector.astype(np.float64) @ orthonormal.T, f"{path}.vector")
    elif edit.sae is not None:  # bind_names adds the vectors
        omitted = (*(("point",) if edit.point is None else ()), *(() if edit.layers else ("layer",)))
        feature = CompiledFeature(edit.sae, edit.feature or 0, edit.set is not None, omitted=omitted)
        low = high = edit.set or 0.0
    elif edit.num_rows is not None:
        indices = vectors.add_rows(vector, path)
    else:
        indices = (vectors.add(bytes_of(vector), path),)
    compiled = CompiledEdit(
        code=CODES[edit.kind],
        point=_number_of(edit.point),
        layers=_compile_layers(edit.layers or (0,)),
        vectors=indices,
        strength=strength_of(edit),
        low=low,
        high=high,
        tokens=_tokens_of(edit.tokens),
        digest=b"",
        when=when,
        parts=compile_parts(edit.tokens),
        live=edit.live or "",
        num_rows=edit.num_rows or 0,
        coordinates=coordinates,
        feature=feature,
    )
    return compiled.with_strength(compiled.strength, vectors.digests)


def strength_of(edit: Edit) -> float:
    """Return the strength of an edit, multiplied by what an edit of a feature adds; 0 means that it changes nothing."""
    return zero_if_underflows(edit.strength * (1.0 if edit.add is None else edit.add))


def _coordinates(values: npt.NDArray[np.float64], field: str) -> bytes:
    """Return coordinates ``[n, k]`` or ``[k]`` in a basis as float32 bytes, by direction, then by position.

    Raises:
        SteeringError: A coordinate overflows float32.
    """
    largest = float(np.abs(values).max())
    if largest > FLOAT32_MAX:
        raise SteeringError(
            field, f"has a component of {largest:.3g} in the subspace; use at most {FLOAT32_MAX:.3g} (float32)"
        )
    return np.ascontiguousarray(np.atleast_2d(values).T, "<f4").tobytes()


def _tokens_of(selector: Selector) -> Wire:
    """Return the positions that a selector may cover; parts of the output are compiled on their own."""
    return "generated" if selector.spans else selector.to_wire()


def _compile_bound(bound: Bound) -> CompiledBound:
    if bound.above is not None:
        return CompiledBound(True, bound.above)
    return CompiledBound(False, bound.below or 0.0)


def _compile_readout(name: str, readout: Readout, vectors: VectorTable) -> CompiledReadout:
    directions = readout.projections if readout.probe is None else readout.probe
    indices: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    mlp = None
    if isinstance(directions, HiddenLayer):
        indices = vectors.add_directions(directions.weights, f"readouts.{name}.probe.weights")
        mlp = compile_mlp(directions)
    elif directions is None:
        pass
    elif isinstance(directions, NamedProjection):
        names = tuple(map(str, directions.probes))
    elif readout.cosine:
        indices = (vectors.add(bytes_of(unit_vector(directions.directions[0])), f"readouts.{name}.probe"),)
    else:
        indices = vectors.add_directions(directions, f"readouts.{name}.{readout.kind.name}")
    return CompiledReadout(
        name=name,
        scalar=readout.kind.is_scalar,
        point=_number_of(readout.point),
        layer=readout.layer or 0,
        vectors=indices,
        bias=readout.bias or 0.0,
        sigmoid=bool(readout.sigmoid),
        tokens=_tokens_of(readout.positions),
        probes=names,
        head=readout.kind.head + (readout.sae or ""),
        top_k=readout.top_k or 0,
        layers=_layers_of_head(readout),
        cosine=bool(readout.cosine),
        parts=compile_parts(readout.positions),
        mlp=mlp,
        omitted=(*readout.omitted, *(("site",) if readout.sae else ())),
        targets=() if readout.lens is None else readout.lens.tokens or (),
    )


def _layers_of_head(readout: Readout) -> tuple[int, ...]:
    """Return the layers that a head reads, (0,) in the place of those that are filled in later; () without a head."""
    if not readout.top_k:
        return ()
    return (0,) if readout.layers == "all" else readout.layers or (0,)


def compile_mlp(probe: HiddenLayer) -> CompiledMlp:
    """Return the part of a probe with a hidden layer that is not among the program's vectors."""
    return CompiledMlp(probe.activation, probe.biases, probe.outputs)


def _find_probe(name: str, readouts: Mapping[str, Readout], numbers: Mapping[str, int], field: str) -> int:
    if name not in numbers:
        raise SteeringError(
            f"{field}.readout", f"{name!r} is not among the request's readouts; {_use_instead(name, numbers)}"
        )
    if not readouts[name].kind.is_scalar:
        raise SteeringError(f"{field}.readout", f"{name!r} has several values per token; name a readout with one probe")
    return numbers[name]


def _use_instead(name: str, numbers: Mapping[str, int]) -> str:
    similar = closest(name, numbers)
    if similar:
        return f"did you mean {similar}?"
    if numbers:
        return f"it has {', '.join(numbers)}"
    return 'declare it, for example readouts={"refusal": {"probe": ..., "point": ..., "layer": ...}}'


def _compile_stop(stop: Stop, readouts: Mapping[str, Readout], numbers: Mapping[str, int], field: str) -> CompiledStop:
    number = _find_probe(stop.readout, readouts, numbers, field)
    return CompiledStop(number, _compile_bound(stop.bound), stop.tokens, compile_parts(stop.positions))


def _compile_condition(
    condition: Condition, edit: Edit, readouts: Mapping[str, Readout], numbers: Mapping[str, int], field: str
) -> CompiledCondition:
    index = _find_probe(condition.readout, readouts, numbers, field)
    kind = WINDOW_CODES.get(condition.window, 0)
    if condition.over is not None:
        kind = (OVER_CODES if condition.window == "prompt" else PREVIOUS_CODES)[condition.over]
    elif condition.tokens is not None:
        kind = HELD
    if kind == TOKEN and isinstance(readouts[condition.readout].probe, HiddenLayer):
        raise SteeringError(f"{field}.window", TOO_LATE)
    if kind != TOKEN and edit.tokens.to_wire() in ("all", "prompt", "last_prompt", *PROMPT_PARTS):
        raise SteeringError(
            f"{field}.window",
            f'"{condition.window}" decides about generated tokens only, not tokens="{edit.tokens.to_wire()}"; '
            'use tokens="generated", or the window "token"',
        )
    return CompiledCondition(
        index,
        kind,
        _compile_bound(condition.bound),
        condition.sharpness or 0.0,
        None if condition.release is None else _compile_bound(condition.release),
        None if condition.positions is None or condition.positions.spans else condition.positions.to_wire(),
        condition.alpha or 0.0,
        condition.tokens or 0,
        compile_parts(condition.positions),
    )


def _compile_captures(spec: CaptureSpec, projection: int) -> list[CompiledCapture]:
    return [
        CompiledCapture(
            point=POINT_NAMES.index(point),
            layers=_compile_layers(layers),
            before=spec.before,
            tokens=spec.tokens.to_wire(),
            projection=projection,
        )
        for point, layers in spec.hooks
    ]


def _number_of(point: PointName | None) -> int:
    """Return the number of a point, and 0 in the place of one that is filled in later."""
    return 0 if point is None else POINT_NAMES.index(point)


def _compile_layers(layers: Layers) -> tuple[int, ...]:
    return ALL_LAYERS if layers == "all" else tuple(layers)

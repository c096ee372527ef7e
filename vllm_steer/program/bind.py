# SPDX-License-Identifier: Apache-2.0
"""Binding of a program: what its edits, readouts, stops and captures name is replaced by what the engine computes.

At admission, :func:`bind_names` fills in probes of modules, the sites and features of autoencoders, and the layers of a
lens over all of them. When the prompt is tokenised, :func:`bind_to_prompt` fills in the tokens and the state of parts,
and the positions of messages and images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_SELECTOR_ITEMS
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.compiled_part import CompiledPart, Markers, bound_parts
from vllm_steer.program.compiler import check_order, compile_mlp
from vllm_steer.program.feature import FeatureVectors, SaeSite
from vllm_steer.program.program import Program
from vllm_steer.program.readouts import CompiledReadout
from vllm_steer.program.records import TOKEN
from vllm_steer.program.vector_table import VectorTable
from vllm_steer.request import Projection, Selector, bytes_of
from vllm_steer.request.condition import condition_source, stop_source
from vllm_steer.request.message_parts import IMAGE, PROMPT_PARTS
from vllm_steer.request.probe import NO_COSINE, TOO_LATE, HiddenLayer, Probe
from vllm_steer.request.readout import SAE_PREFIX
from vllm_steer.request.selector import OPEN_END, Wire
from vllm_steer.request.vector import unit_vector


class Names(Protocol):
    """Probes and autoencoders by the names in a program.

    Each method raises SteeringError for ``field`` if the name is unknown.
    """

    @property
    def num_layers(self) -> int:
        """The model's number of layers."""

    @property
    def any_site(self) -> bool:
        """Whether an autoencoder is served at other sites than its own."""

    def probe(self, name: str, field: str) -> Probe:
        """Return the probe of a module."""

    def site(self, sae: str, field: str) -> SaeSite:
        """Return the site of an autoencoder; ``field`` is the path of the edit or readout."""

    def feature(self, sae: str, index: int, field: str) -> FeatureVectors:
        """Return a feature of an autoencoder; ``field`` is the path of the edit."""


def bind_names(program: Program, names: Names) -> Program:
    """Return the program with the probes, sites, features and layers that its edits and readouts name.

    Raises:
        SteeringError: A name is unknown, vectors differ in width, an autoencoder is at another site than its own, a
            feature cannot be set, or the request contradicts what is registered with a probe.
    """
    vectors = VectorTable(program.width if program.vectors else 0, program.vector_source if program.vectors else "")
    for digest, data in zip(program.digests, program.vectors, strict=True):
        vectors.add(data, "", digest)
    edits = [
        edit if edit.feature is None else _bind_feature(edit, names, vectors, program.edit_source(number))
        for number, edit in enumerate(program.edits)
    ]
    readouts = []
    for number, readout in enumerate(program.readouts):
        source = program.readout_source(number)
        if "layers" in readout.omitted:
            readout = msgspec.structs.replace(readout, layers=tuple(range(names.num_layers)), omitted=())
        elif readout.head.startswith(SAE_PREFIX):
            readout = _bind_sae(readout, names, source)
        elif readout.probes and readout.scalar:
            readout = _bind_probe(readout, names, vectors, source)
            if readout.mlp is not None:
                _check_windows(program, number)
        elif readout.probes:
            readout = _bind_projections(readout, names, vectors, source)
        readouts.append(readout)
    bound = msgspec.structs.replace(program, edits=tuple(edits), readouts=tuple(readouts), **vectors.fields())
    check_order(bound)
    return bound


def _bind_feature(edit: CompiledEdit, names: Names, vectors: VectorTable, source: str) -> CompiledEdit:
    """Return an edit of a feature with its site and its vectors."""
    feature = edit.feature
    if feature is None or edit.vectors:
        return edit
    site = names.site(feature.sae, source)
    point, layers = site.place(
        feature.sae, edit.point, edit.layers, feature.omitted, f"{source}.layers", any_site=names.any_site
    )
    found = names.feature(feature.sae, feature.index, source)
    if feature.sets and found.problem:
        raise SteeringError(f"{source}.set", found.problem)
    used = (found.encoder, found.decoder) if feature.sets else (found.decoder,)
    indices = tuple(vectors.add(bytes_of(vector), f"{source}.sae") for vector in used)
    feature = msgspec.structs.replace(feature, omitted=())
    if feature.sets:
        feature = msgspec.structs.replace(feature, bias=found.bias, threshold=found.threshold)
    bound = msgspec.structs.replace(edit, point=point, layers=layers, vectors=indices, feature=feature)
    return bound.with_strength(edit.strength, vectors.digests)


def _bind_sae(readout: CompiledReadout, names: Names, source: str) -> CompiledReadout:
    """Return a readout of an autoencoder with its site."""
    sae = readout.head.removeprefix(SAE_PREFIX)
    point, layers = names.site(sae, source).place(
        sae, readout.point, readout.layers, readout.omitted, f"{source}.layer", any_site=names.any_site
    )
    return msgspec.structs.replace(readout, point=point, layer=layers[0], layers=layers, omitted=())


def _bind_probe(readout: CompiledReadout, names: Names, vectors: VectorTable, source: str) -> CompiledReadout:
    """Return a readout of a module's probe with its weights, and the reading that is registered with them."""
    name = readout.probes[0]
    probe = names.probe(name, f"{source}.probe")
    point = POINT_NAMES[readout.point]
    given = {"bias": readout.bias, "sigmoid": readout.sigmoid, "point": point, "layer": readout.layer}
    probe.check(name, {key: value for key, value in given.items() if key not in readout.omitted}, source)
    for key in ("point", "layer"):
        if key in readout.omitted and key not in probe.reading:
            raise SteeringError(f"{source}.{key}", f"is missing; the probe {name} was registered without it")
    if readout.cosine and (probe.bias or probe.sigmoid):
        problem = f"cannot be combined with the probe {name}, which was registered with a bias or a sigmoid; omit it"
        raise SteeringError(f"{source}.cosine", problem)
    mlp, field = None, f"{source}.probe"
    if isinstance(probe.weights, HiddenLayer):
        if readout.cosine:
            raise SteeringError(f"{source}.cosine", NO_COSINE)
        mlp, weights = compile_mlp(probe.weights), vectors.add_directions(probe.weights.weights, field)
    else:
        weights = (vectors.add(bytes_of(unit_vector(probe.weights) if readout.cosine else probe.weights), field),)
    whole = given | probe.reading | {"point": POINT_NAMES.index((given | probe.reading)["point"])}
    return msgspec.structs.replace(readout, probes=(), vectors=weights, mlp=mlp, omitted=(), **whole)


def _bind_projections(readout: CompiledReadout, names: Names, vectors: VectorTable, source: str) -> CompiledReadout:
    """Return a readout of projections on modules' probes with their directions."""
    directions, field = [], f"{source}.projections"
    for i, name in enumerate(readout.probes):
        probe = names.probe(name, f"{field}[{i}]")
        probe.check(name, {"point": POINT_NAMES[readout.point], "layer": readout.layer}, source)
        directions.append(probe.projected(name, f"{field}[{i}]"))
    rows = vectors.add_directions(Projection(directions, field), field)
    return msgspec.structs.replace(readout, probes=(), vectors=rows)


def _check_windows(program: Program, number: int) -> None:
    """Raise SteeringError if an edit needs the value of a readout with a hidden layer at the same token."""
    for i, edit in enumerate(program.edits):
        for j, condition in enumerate(edit.when):
            if condition.readout == number and condition.kind == TOKEN:
                source = condition_source(program.edit_source(i), j, len(edit.when))
                raise SteeringError(f"{source}.window", TOO_LATE)


FindMarkers = Callable[[CompiledPart, str], Markers | None]
Ranges = Sequence[tuple[int, int]]
FindRanges = Callable[[str, str], Ranges]


def bind_to_prompt(program: Program, message: Sequence[int], ranges: FindRanges, find: FindMarkers) -> Program:
    """Return the program with everything filled in that depends on the model's tokens and on the prompt.

    Args:
        program: The program.
        message: The tokens of the message that the prompt leaves open, which alone decide whether a part has begun.
        ranges: Returns the positions of messages or images as ascending ranges; the stop of an open one is
            ``OPEN_END``. It gets the name of the part and the path of the field.
        find: Returns the markers of a part, or None to leave the part out. It gets the path of the field.

    Raises:
        SteeringError: The tokens of a part are not known, or the prompt has no such message or image.
    """

    def parts_of(parts: tuple[CompiledPart, ...], field: str) -> tuple[CompiledPart, ...]:
        return bound_parts(parts, lambda part: find(part, field), message) if parts else parts

    edits = []
    for number, edit in enumerate(program.edits):
        source = program.edit_source(number)
        when = []
        for i, condition in enumerate(edit.when):
            field = f"{condition_source(source, i, len(edit.when))}.positions"
            tokens = None if condition.tokens is None else _positions(condition.tokens, ranges, field)
            when.append(msgspec.structs.replace(condition, tokens=tokens, parts=parts_of(condition.parts, field)))
        bound = msgspec.structs.replace(
            edit,
            tokens=_positions(edit.tokens, ranges, f"{source}.tokens"),
            parts=parts_of(edit.parts, f"{source}.tokens"),
            when=tuple(when),
        )
        edits.append(edit if bound == edit else bound.with_strength(bound.strength, program.digests))
    readouts = []
    for number, readout in enumerate(program.readouts):
        field = f"{program.readout_source(number)}.positions"
        tokens = _positions(readout.tokens, ranges, field)
        readouts.append(msgspec.structs.replace(readout, tokens=tokens, parts=parts_of(readout.parts, field)))
    stops = [
        msgspec.structs.replace(stop, parts=parts_of(stop.parts, f"{stop_source(i)}.positions"))
        for i, stop in enumerate(program.stops)
    ]
    captures = [
        msgspec.structs.replace(
            capture, tokens=_positions(capture.tokens, ranges, f"{program.capture_source(i)}.positions")
        )
        for i, capture in enumerate(program.captures)
    ]
    return msgspec.structs.replace(
        program, edits=tuple(edits), captures=tuple(captures), readouts=tuple(readouts), stops=tuple(stops)
    )


def bind_selector(selector: Selector, ranges: FindRanges, field: str) -> Selector:
    """Return the selector of a capture with the positions of the messages or images that it names."""
    return Selector.from_wire(_positions(selector.to_wire(), ranges, field)) if selector.is_prompt_part else selector


def _positions(tokens: Wire, ranges: FindRanges, field: str) -> Wire:
    if not isinstance(tokens, str) or tokens not in PROMPT_PARTS:
        return tokens
    found = ranges(tokens, field)
    if not found:
        what = "images" if tokens == IMAGE else f"messages of the role {tokens}"
        raise SteeringError(field, f"selects {what}, but the prompt has none")
    if len(found) > MAX_SELECTOR_ITEMS:
        raise SteeringError(
            field, f"selects {len(found)} ranges of tokens of this prompt; at most {MAX_SELECTOR_ITEMS} are allowed"
        )
    return [[start, None if stop == OPEN_END else stop] for start, stop in found]

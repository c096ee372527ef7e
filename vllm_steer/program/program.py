# SPDX-License-Identifier: Apache-2.0
"""A request's edits and captures in the form that travels from the front end to every process of the engine.

A :class:`Program` is immutable and content-addressed. Vectors appear once, by digest, as float32 bytes. Equal edits of
two requests have equal digests and therefore share vectors, table rows and prefix-cache blocks in the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_LAYERS
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.program.compiled_capture import NO_PROJECTION, CompiledCapture
from vllm_steer.program.compiled_edit import WIRE_VERSION, CompiledEdit, edit_digest
from vllm_steer.program.compiled_part import CompiledPart
from vllm_steer.program.instructions import KIND_OF, REPLACE
from vllm_steer.program.program_cache import CachedProgram, ProgramCache
from vllm_steer.program.readouts import CompiledReadout
from vllm_steer.program.records import PART, STOP, STOP_COLUMN, TOKEN, CompiledCondition, CompiledStop, RecordLayout
from vllm_steer.request import Selector, content_digest, projection_digest
from vllm_steer.request.condition import condition_source, stop_source
from vllm_steer.request.references import GLOBAL_SOURCE, MODULES_FIELD, SERVER_WIDE_SOURCE

ALL_LAYERS: tuple[int, ...] = ()

_FIELD = "extra_args.steer"
_NOT_A_PROGRAM = "is reserved for compiled programs; set steering_vectors, steering, capture or readouts instead"
_SHARED_SOURCES = (MODULES_FIELD, GLOBAL_SOURCE, SERVER_WIDE_SOURCE)
_OUTLINE = "_outline"
_OF_STRUCTURE = (
    "points", "selections", "selected_parts", "own_positions", "has_records", "part_selections", "gate_groups",
    "has_names", "kinds", "needs_prompt", "layout", "num_conditions",
)  # fmt: skip
"""Properties that do not depend on the content of vectors."""
_INCONSISTENT = "the parts of the program do not fit together; compile it with this version of vllm-steer"


class Program(msgspec.Struct, frozen=True, array_like=True, dict=True, weakref=True):
    """The edits of one request, in the order in which they apply, its captures, readouts and stops.

    ``vectors[i]`` holds ``width`` little-endian float32 values and ``digests[i]`` their content digest. A projection is
    a tuple of indices into the vectors. ``sources`` are the paths of the request fields that the edits, then the
    captures, come from, for error messages; it is empty if they are unknown.
    """

    version: int
    width: int
    edits: tuple[CompiledEdit, ...]
    captures: tuple[CompiledCapture, ...]
    digests: tuple[bytes, ...]
    vectors: tuple[memoryview, ...]
    projections: tuple[tuple[int, ...], ...] = ()
    sources: tuple[str, ...] = ()
    readouts: tuple[CompiledReadout, ...] = ()
    stops: tuple[CompiledStop, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the wire form."""
        return msgspec.msgpack.encode(self)

    def encode_cached(self) -> bytes:
        """Return the wire form and cache the program as verified.

        Only for programs that this process compiled or composed from verified ones.
        """
        data = self.to_bytes()
        # Decoded again, so that the vectors are views of `data` and are not held twice.
        cached = PROGRAM_CACHE.get(data) or CachedProgram(msgspec.msgpack.decode(data, type=Program), False, data)
        if not cached.verified:
            cached = PROGRAM_CACHE.put(cached._replace(verified=True))
            if self.outline is not self:
                cached.program._follow(self.outline)
        return cached.data

    @property
    def outline(self) -> Program:
        """The program that this one was made from by :meth:`with_vectors`; otherwise the program itself.

        What follows from a program's structure can be found out once, for its outline.
        """
        outline: Program = vars(self).get(_OUTLINE, self)
        return outline

    def _follow(self, outline: Program) -> None:
        """Take over what follows from the structure of a program that differs in vectors only."""
        known = vars(outline)
        vars(self).update({name: known[name] for name in _OF_STRUCTURE if name in known}, **{_OUTLINE: outline})

    def with_vectors(self, changed: Mapping[int, bytes]) -> Program | None:
        """Return the program with other vectors, by index, of the same width.

        Returns:
            None if two vectors are equal, because a program has equal vectors once.
        """
        digests, vectors = list(self.digests), list(self.vectors)
        for index, data in changed.items():
            digests[index], vectors[index] = content_digest(data), memoryview(data)
        if len(set(digests)) < len(digests):
            return None
        edits = tuple(edit.with_strength(edit.strength, digests) for edit in self.edits)
        made = msgspec.structs.replace(self, edits=edits, digests=tuple(digests), vectors=tuple(vectors))
        made._follow(self.outline)
        return made

    @classmethod
    def from_bytes(cls, data: bytes) -> Program:
        """Decode ``data`` and verify its structure, numbers and digests.

        Raises:
            SteeringError: :meth:`to_bytes` did not write ``data``.
        """
        return _load(data, verify=True).program

    @classmethod
    def from_trusted_bytes(cls, data: bytes) -> Program:
        """Decode a program that the front end has verified; digests are not computed again.

        Raises:
            SteeringError: ``data`` is not a usable program.
        """
        return _load(data, verify=False).program

    @classmethod
    def intern(cls, data: bytes) -> tuple[Program, bytes]:
        """Return :meth:`from_trusted_bytes` and the cached copy of ``data``, which is shared by equal programs."""
        cached = _load(data, verify=False)
        return cached.program, cached.data

    @cached_property
    def points(self) -> frozenset[PointName]:
        """The points that are edited, captured or read."""
        parts: tuple[CompiledEdit | CompiledCapture | CompiledReadout, ...]
        parts = (*self.edits, *self.captures, *self.readouts)
        return frozenset(POINT_NAMES[part.point] for part in parts)

    def edit_source(self, index: int) -> str:
        """Return the path of the request field that edit ``index`` comes from."""
        return self.sources[index] if self.sources else "steering"

    @property
    def conditions(self) -> list[CompiledCondition]:
        """The conditions of all edits."""
        return [condition for edit in self.edits for condition in edit.when]

    @property
    def vector_source(self) -> str:
        """Path of the first vector in the request, of a program that has vectors."""
        for i, edit in enumerate(self.edits):
            if not edit.is_pending:
                return self.edit_source(i)
        for i, readout in enumerate(self.readouts):
            if readout.vectors:
                return self.readout_source(i)
        projected = (i for i, capture in enumerate(self.captures) if capture.projection != NO_PROJECTION)
        return f"{self.capture_source(next(projected, 0))}.reduce.directions"

    def capture_source(self, index: int) -> str:
        """Return the path of the capture spec that capture ``index`` comes from."""
        return self.sources[len(self.edits) + index] if self.sources else "capture"

    @cached_property
    def selections(self) -> tuple[tuple[Selector, tuple[str, ...]], ...]:
        """The distinct selectors of edits, readouts and stops outside of parts of the output, with their paths.

        Edits of strength 0 are left out here, in `selected_parts` and in `zero_edits`: they are reported as such.
        """
        paths: dict[Selector, dict[str, None]] = {}
        for index, edit in enumerate(self.edits):
            if edit.strength and not edit.parts:
                paths.setdefault(edit.selector, {})[self.edit_source(index)] = None
        for index, readout in enumerate(self.readouts):
            if not readout.parts:
                paths.setdefault(readout.selector, {})[self.readout_source(index)] = None
        for index, stop in enumerate(self.stops):
            if not stop.parts:
                paths.setdefault(Selector("generated"), {})[stop_source(index)] = None
        return tuple((selector, tuple(sources)) for selector, sources in paths.items())

    @cached_property
    def selected_parts(self) -> tuple[tuple[tuple[CompiledPart, ...], str], ...]:
        """The parts of the output of each edit, condition, readout and stop that has some, with its path."""
        found: list[tuple[tuple[CompiledPart, ...], str]] = []
        for index, edit in enumerate(self.edits):
            source = self.edit_source(index)
            if edit.strength:
                found.append((edit.parts, source))
                found += [(each.parts, condition_source(source, i, len(edit.when))) for i, each in enumerate(edit.when)]
        found += [(each.parts, self.readout_source(index)) for index, each in enumerate(self.readouts)]
        found += [(each.parts, stop_source(index)) for index, each in enumerate(self.stops)]
        return tuple((parts, source) for parts, source in found if parts)

    @cached_property
    def zero_edits(self) -> tuple[str, ...]:
        """Paths of the edits whose vector is zero, which change nothing."""
        zero = {index for index in range(len(self.vectors)) if not np.count_nonzero(self.vector(index))}
        return tuple(
            dict.fromkeys(
                self.edit_source(i)
                for i, edit in enumerate(self.edits)
                if edit.strength and edit.code != REPLACE and zero.issuperset(edit.vectors[-1:] or (-1,))
            )
        )

    @cached_property
    def own_positions(self) -> tuple[tuple[Selector, str], ...]:
        """Selectors with absolute or relative positions in the request's own fields, and their paths.

        Modules, global steering and server-wide captures are left out: they apply to requests of any length.
        """
        edits = [(edit.selector, self.edit_source(i), "tokens") for i, edit in enumerate(self.edits)]
        captures = [(each.selector, self.capture_source(i), "positions") for i, each in enumerate(self.captures)]
        readouts = [(each.selector, self.readout_source(i), "positions") for i, each in enumerate(self.readouts)]
        return tuple(
            (selector, f"{source}.{field}")
            for selector, source, field in (*edits, *captures, *readouts)
            if not selector.is_named and not source.startswith(_SHARED_SOURCES)
        )

    def without_captures(self) -> Program:
        """Return the program with its edits only."""
        return msgspec.structs.replace(self, captures=(), projections=(), sources=self.sources[: len(self.edits)])

    def readout_source(self, index: int) -> str:
        """Return the path of the request field that readout ``index`` comes from."""
        return f"readouts.{self.readouts[index].name}"

    def directions(self, projection: int) -> tuple[bytes, ...]:
        """Return the digests of a projection's directions, in order."""
        return tuple(self.digests[index] for index in self.projections[projection])

    @cached_property
    def projection_digests(self) -> tuple[bytes, ...]:
        """The digest of each projection."""
        return tuple(projection_digest(self.directions(i)) for i in range(len(self.projections)))

    def vector(self, index: int) -> np.ndarray:
        """Return vector ``index`` as a read-only float32 array ``[width]``."""
        return np.frombuffer(self.vectors[index], dtype="<f4")

    @cached_property
    def has_records(self) -> bool:
        """Whether tokens of the request have records."""
        return bool(self.readouts) or any(edit.live or edit.parts for edit in self.edits)

    @cached_property
    def part_selections(self) -> tuple[tuple[CompiledPart, ...], ...]:
        """The distinct selections of parts by edits without conditions, readouts, conditions and stops."""
        edits = (edit.parts for edit in self.edits if not edit.when)
        conditions = (each.parts for each in self.conditions)
        found = (*edits, *(each.parts for each in self.readouts), *(each.parts for each in self.stops), *conditions)
        return tuple(dict.fromkeys(parts for parts in found if parts))

    @cached_property
    def gate_groups(self) -> tuple[tuple[int, ...], ...]:
        """The edits with conditions, by index, in groups whose conditions are equal.

        A condition of the window ``token`` is an instruction at a site, so its edit is a group of its own.
        """
        groups: dict[Any, list[int]] = {}
        for number, edit in enumerate(self.edits):
            if edit.when:
                own = any(each.kind == TOKEN for each in edit.when)
                # By their encoding: before a program has travelled, its conditions may hold lists.
                key = number if own else msgspec.msgpack.encode((edit.when, edit.parts))
                groups.setdefault(key, []).append(number)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def has_names(self) -> bool:
        """Whether the front end has to fill in probes of modules, or sites or features of autoencoders."""
        pending = any(edit.is_pending for edit in self.edits)
        return pending or any(each.probes or each.omitted for each in self.readouts)

    @cached_property
    def needs_prompt(self) -> bool:
        """Whether the front end has to fill in the ids and state of parts, or the positions of messages and images."""
        parts = [part for selection in self.part_selections for part in selection]
        parts += [part for edit in self.edits for part in edit.parts]
        selecting: tuple[CompiledEdit | CompiledReadout | CompiledCapture | CompiledCondition, ...]
        selecting = (*self.edits, *self.readouts, *self.captures, *self.conditions)
        of_prompt = (selector.is_prompt_part for each in selecting if (selector := each.selector) is not None)
        return not all(part.bound for part in parts) or any(of_prompt)

    @cached_property
    def layout(self) -> RecordLayout:
        """The columns of the request's records."""
        column = STOP_COLUMN + 1
        readouts: list[int] = []
        for readout in self.readouts:
            readouts.append(column)
            column += readout.width
        gates: dict[int, int] = {}
        live: dict[str, int] = {}
        for group in self.gate_groups:
            gates |= dict.fromkeys(group, column)
            column += 1
        for edit in self.edits:
            if edit.live and edit.live not in live:
                live[edit.live] = column
                column += 1
        parts = {selection: column + i for i, selection in enumerate(self.part_selections)}
        gates |= {i: parts[edit.parts] for i, edit in enumerate(self.edits) if edit.parts and not edit.when}
        return RecordLayout(tuple(readouts), dict(sorted(gates.items())), live, parts, column + len(parts))

    @cached_property
    def num_conditions(self) -> tuple[int, int]:
        """Number of distinct conditions in ``when`` and in stops, and of the spans of parts that they and others need.

        Spans that the engine may not have count once the front end has found them.
        """
        gated = [self.edits[group[0]] for group in self.gate_groups]
        selections = (*(edit.parts for edit in gated), *self.part_selections)
        spans = sum(not part.optional for selection in selections for part in selection)
        return sum(len(edit.when) for edit in gated) + len(self.stops), spans

    @cached_property
    def records_digest(self) -> bytes:
        """Digest of everything that decides about gated edits: readouts and all edits."""
        readouts = [
            (*msgspec.structs.astuple(readout), [self.digests[index] for index in readout.vectors])
            for readout in self.readouts
        ]
        edits = [(edit.digest, edit.tokens, edit.when, edit.parts) for edit in self.edits]
        return content_digest(msgspec.msgpack.encode((readouts, edits)))

    @cached_property
    def digest(self) -> bytes:
        """Digest of the content without the paths in the request."""
        content = (self.edits, self.captures, self.digests, self.readouts, self.stops)
        return content_digest(msgspec.msgpack.encode(content))

    @cached_property
    def kinds(self) -> Mapping[str, Mapping[str, int]]:
        """Number of edits and of readouts by kind, for metrics."""
        edits, readouts = (KIND_OF[edit.code] for edit in self.edits), (each.kind.name for each in self.readouts)
        return {"edits": Counter[str](edits), "readouts": Counter[str](readouts)}

    @cached_property
    def resolve_cache(self) -> dict[Any, Any]:
        """Results of :func:`~vllm_steer.program.resolve.resolve`, by its other arguments."""
        return {}

    @cached_property
    def by_digest(self) -> dict[bytes, int]:
        """The index of each vector by its digest."""
        return {digest: index for index, digest in enumerate(self.digests)}

    def _verify_structure(self) -> None:
        """Raise SteeringError if an index, size or selector would make the engine fail."""
        parts: tuple[CompiledEdit | CompiledCapture, ...] = (*self.edits, *self.captures)
        num_vectors = len(self.vectors)
        sound = (
            len(self.digests) == num_vectors
            and len(self.sources) in (0, len(parts))
            and all(len(vector) == 4 * self.width for vector in self.vectors)
            and all(
                0 <= part.point < len(POINT_NAMES) and all(0 <= layer < MAX_LAYERS for layer in part.layers)
                for part in parts
            )
            and all(
                edit.code in KIND_OF and edit.is_sound and all(0 <= index < num_vectors for index in edit.vectors)
                for edit in self.edits
            )
            and all(NO_PROJECTION <= capture.projection < len(self.projections) for capture in self.captures)
            and all(indices and 0 <= min(indices) <= max(indices) < num_vectors for indices in self.projections)
            and all(readout.is_sound(num_vectors) for readout in self.readouts)
            and all(map(self._is_sound_condition, self.conditions))
            and all(0 <= stop.readout < len(self.readouts) and stop.tokens > 0 for stop in self.stops)
        )
        if not sound:
            raise SteeringError(_FIELD, _INCONSISTENT)
        for part in (*parts, *self.readouts):
            Selector.from_wire(part.tokens)

    def _is_sound_condition(self, condition: CompiledCondition) -> bool:
        if condition.tokens is not None:
            Selector.from_wire(condition.tokens)
        return (
            TOKEN <= condition.kind < STOP
            and condition.kind != PART
            and condition.count >= 0
            and 0 <= condition.alpha < 1
            and 0 <= condition.readout < len(self.readouts)
        )

    def _verify_content(self) -> None:
        """Raise SteeringError if a number is not finite or a digest does not match its content."""
        features = [edit.feature for edit in self.edits if edit.feature is not None]
        bounds = [bound for each in self.conditions for bound in (each.bound, each.release) if bound is not None]
        numbers = [
            *(number for edit in self.edits for number in (edit.strength, edit.low, edit.high)),
            *(number for feature in features for number in (feature.bias, feature.threshold)),
            *(readout.bias for readout in self.readouts),
            *(condition.sharpness for condition in self.conditions),
            *(bound.threshold for bound in (*bounds, *(stop.bound for stop in self.stops))),
        ]
        mlps = [readout.mlp for readout in self.readouts if readout.mlp is not None]
        arrays: tuple[bytes | memoryview, ...] = (
            *self.vectors,
            *(edit.coordinates for edit in self.edits),
            *(array for mlp in mlps for array in (mlp.biases, mlp.outputs)),
        )
        sound = (
            all(content_digest(vector) == digest for vector, digest in zip(self.vectors, self.digests, strict=True))
            and all(edit.digest == edit_digest(edit, edit.strength, self.digests) for edit in self.edits)
            and np.isfinite(numbers).all()
            and all(np.isfinite(np.frombuffer(array, "<f4")).all() for array in arrays)
        )
        if not sound:
            raise SteeringError(_FIELD, _INCONSISTENT)


PROGRAM_CACHE: ProgramCache[Program] = ProgramCache()


def _load(data: bytes, *, verify: bool) -> CachedProgram[Program]:
    if not isinstance(data, bytes):
        raise SteeringError(_FIELD, _NOT_A_PROGRAM)
    cached = PROGRAM_CACHE.get(data)
    if cached is None:
        cached = CachedProgram(_decode(data), False, data)
    elif cached.verified or not verify:
        return cached
    if verify:
        cached.program._verify_content()
        cached = cached._replace(verified=True)
    return PROGRAM_CACHE.put(cached)


def _decode(data: bytes) -> Program:
    try:
        program = msgspec.msgpack.decode(data, type=Program)
    except msgspec.MsgspecError as error:
        raise SteeringError(_FIELD, f"not a compiled program ({error})") from None
    if program.version != WIRE_VERSION:
        raise SteeringError(
            _FIELD,
            f"was compiled by another version of vllm-steer (format {program.version}; the engine reads "
            f"{WIRE_VERSION}); install one version for front end and engine",
        )
    program._verify_structure()
    return program

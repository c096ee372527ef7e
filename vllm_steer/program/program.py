# SPDX-License-Identifier: Apache-2.0
"""A request's edits in the form that travels from the front end to every process of the engine.

A :class:`Program` is immutable and content-addressed: vectors appear once, by digest, as float32 bytes; equal edits
of two requests have equal digests, and so share vectors, rows and prefix-cache blocks in the engine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.program.instructions import CODES, KIND_OF, UNBOUNDED
from vllm_steer.program.program_cache import PROGRAMS, CachedProgram
from vllm_steer.spec import KINDS, CaptureSpec, Edit, Projection, Selector, bytes_of, content_digest, projection_digest
from vllm_steer.spec.edit import MAX_LAYERS

WIRE_VERSION = 5
ALL_LAYERS: tuple[int, ...] = ()
NO_PROJECTION = -1
"""The ``projection`` of a read whose rows leave as they are."""


class CompiledEdit(msgspec.Struct, frozen=True, array_like=True):
    """One edit, compiled: what to do, where, with which vector and on which tokens."""

    code: int
    point: int
    layers: tuple[int, ...]
    vector: int
    strength: float
    low: float
    high: float
    tokens: str | list[int | list[int | None]]
    digest: bytes

    @property
    def selector(self) -> Selector:
        return Selector.from_wire(self.tokens)

    def with_strength(self, strength: float, vector_digest: bytes) -> CompiledEdit:
        """The same edit at another strength; ``vector_digest`` is that of its vector."""
        return msgspec.structs.replace(self, strength=strength, digest=_step_digest(self, strength, vector_digest))


class CompiledRead(msgspec.Struct, frozen=True, array_like=True):
    """One read, compiled: the stream at a point of some layers, on some tokens, ``before`` or after the edits there.

    ``projection`` is the place of the directions on which rows are projected before they leave, or
    :data:`NO_PROJECTION`. What
    else becomes of them (consumer, dtype, mean) is the front end's business and is not part of the program.
    """

    point: int
    layers: tuple[int, ...]
    before: bool
    tokens: str | list[int | list[int | None]]
    projection: int = NO_PROJECTION

    @property
    def selector(self) -> Selector:
        return Selector.from_wire(self.tokens)


class Program(msgspec.Struct, frozen=True, array_like=True, dict=True, weakref=True):
    """All edits of one request, in the order in which they apply, and all its reads.

    ``vectors[i]`` holds ``width`` little-endian float32 values; ``digests[i]`` is their content digest. A projection is
    the places of its directions among them.
    """

    version: int
    width: int
    steps: tuple[CompiledEdit, ...]
    reads: tuple[CompiledRead, ...]
    digests: tuple[bytes, ...]
    vectors: tuple[memoryview, ...]
    projections: tuple[tuple[int, ...], ...] = ()

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def seal(self) -> bytes:
        """:meth:`to_bytes` of a program that this process has compiled, or put together of such and of checked ones:
        when the bytes come back they need no check."""
        data = self.to_bytes()
        # As read from ``data``, where its vectors stand: those that it was compiled from are not held beside them.
        kept = PROGRAMS.find(data) or CachedProgram(msgspec.msgpack.decode(data, type=Program), False, data)
        if not kept.checked:
            kept = PROGRAMS.keep(kept._replace(checked=True))
        return kept.data

    @classmethod
    def from_bytes(cls, data: bytes) -> Program:
        """Decode; raises :class:`SteeringError` on anything that :meth:`to_bytes` did not write."""
        if not isinstance(data, bytes):
            raise SteeringError("extra_args.steer", "not a compiled program; use steering_vectors or steering instead")
        return _kept(data, checked=True).program

    @classmethod
    def from_checked(cls, data: bytes) -> Program:
        """Decode what the front end has checked already: digests are not computed again.

        Raises :class:`SteeringError` on anything that is not a program at all.
        """
        return cls.shared(data)[0]

    @classmethod
    def shared(cls, data: bytes) -> tuple[Program, bytes]:
        """As :meth:`from_checked`, with the bytes to hold from now on: of equal ones a single copy."""
        if not isinstance(data, bytes):
            raise SteeringError("extra_args.steer", "not a compiled program; use steering_vectors or steering instead")
        kept = _kept(data, checked=False)
        return kept.program, kept.data

    def _check_parts(self) -> None:
        """What the type cannot say, as far as it keeps an engine from using the program at all."""
        sound = (
            len(self.digests) == len(self.vectors)
            and all(len(vector) == 4 * self.width for vector in self.vectors)
            and all(
                step.code in KIND_OF
                and 0 <= step.point < len(POINT_NAMES)
                and 0 <= step.vector < len(self.vectors)
                and all(0 <= layer < MAX_LAYERS for layer in step.layers)
                for step in self.steps
            )
        )
        if not sound:
            raise SteeringError(
                "extra_args.steer", "the program's parts do not fit together; build it with this package"
            )
        if not all(
            0 <= read.point < len(POINT_NAMES)
            and all(0 <= layer < MAX_LAYERS for layer in read.layers)
            and NO_PROJECTION <= read.projection < len(self.projections)
            for read in self.reads
        ) or not all(places and 0 <= min(places) <= max(places) < len(self.vectors) for places in self.projections):
            raise SteeringError("extra_args.steer", "a read is of no point or layer; build it with this package")
        for tokens in (*(step.tokens for step in self.steps), *(read.tokens for read in self.reads)):
            Selector.from_wire(tokens)

    def _check(self) -> None:
        """That numbers are finite and digests those of the content."""
        sound = all(
            content_digest(vector) == digest for vector, digest in zip(self.vectors, self.digests, strict=True)
        ) and all(
            np.isfinite([step.strength, step.low, step.high]).all()
            and step.digest == _step_digest(step, step.strength, self.digests[step.vector])
            for step in self.steps
        )
        if not sound or not all(np.isfinite(self.vector(i)).all() for i in range(len(self.vectors))):
            raise SteeringError(
                "extra_args.steer", "the program's parts do not fit together; build it with this package"
            )

    @cached_property
    def points(self) -> frozenset[PointName]:
        """Where it edits or reads."""
        numbers = {step.point for step in self.steps} | {read.point for read in self.reads}
        return frozenset(POINT_NAMES[number] for number in numbers)

    def without_reads(self) -> Program:
        """The same edits and no read."""
        return msgspec.structs.replace(self, reads=(), projections=())

    def directions(self, projection: int) -> tuple[bytes, ...]:
        """The digests of a projection's directions, in order."""
        return tuple(self.digests[place] for place in self.projections[projection])

    @cached_property
    def projection_digests(self) -> tuple[bytes, ...]:
        """Each projection's digest."""
        return tuple(projection_digest(self.directions(i)) for i in range(len(self.projections)))

    def vector(self, index: int) -> np.ndarray:
        """Vector ``index`` as float32 ``[width]``, read-only."""
        return np.frombuffer(self.vectors[index], dtype="<f4")

    @cached_property
    def resolved(self) -> dict[Any, Any]:
        """What :func:`~vllm_steer.program.resolve.resolve` has made of this program, by its other arguments."""
        return {}

    @cached_property
    def by_digest(self) -> dict[bytes, int]:
        return {digest: index for index, digest in enumerate(self.digests)}


def _kept(data: bytes, checked: bool) -> CachedProgram:
    kept = PROGRAMS.find(data)
    if kept is None:
        kept = CachedProgram(_decode_now(data), False, data)
    elif kept.checked or not checked:
        return kept
    if checked:
        kept.program._check()
        kept = kept._replace(checked=True)
    return PROGRAMS.keep(kept)


def _decode_now(data: bytes) -> Program:
    try:
        program = msgspec.msgpack.decode(data, type=Program)
    except msgspec.MsgspecError as error:
        raise SteeringError("extra_args.steer", f"not a compiled program ({error})") from None
    if program.version != WIRE_VERSION:
        raise SteeringError("extra_args.steer", f"wire version {program.version}, this engine reads {WIRE_VERSION}")
    program._check_parts()
    return program


def _step_digest(step: CompiledEdit, strength: float, vector_digest: bytes) -> bytes:
    """Content of one edit less its selector: the same edit on other tokens has the same digest."""
    # With the version: what a point's number means is part of the content.
    head = struct.pack("<BBBddd", WIRE_VERSION, step.code, step.point, strength, step.low, step.high)
    return content_digest(head + struct.pack(f"<{len(step.layers)}i", *step.layers) + vector_digest)


def compile_program(edits: Sequence[Edit], captures: Sequence[CaptureSpec] = ()) -> Program:
    """The program of ``edits``, which apply in the order given, and of the reads of ``captures``.

    Edits of strength 0 change nothing and are left out; equal reads appear once.

    Raises:
        SteeringError: directions of a capture have another width than the edits' vectors, or those of another capture.
    """
    steps: list[CompiledEdit] = []
    vectors: dict[bytes, tuple[int, bytes]] = {}
    for edit in edits:
        if edit.strength == 0.0:
            continue
        vector = edit.vector
        if KINDS[edit.kind].needs_direction:
            wide = vector.astype(np.float64)
            vector = np.ascontiguousarray(wide / np.linalg.norm(wide), dtype="<f4")
        data = bytes_of(vector)
        digest = content_digest(data)
        index, _ = vectors.setdefault(digest, (len(vectors), data))
        step = CompiledEdit(
            code=CODES[edit.kind],
            point=POINT_NAMES.index(edit.point),
            layers=ALL_LAYERS if edit.layers == "all" else tuple(edit.layers),
            vector=index,
            strength=float(edit.strength),
            low=-UNBOUNDED if edit.low is None else float(edit.low),
            high=UNBOUNDED if edit.high is None else float(edit.high),
            tokens=edit.tokens.to_wire(),
            digest=b"",
        )
        steps.append(step.with_strength(step.strength, digest))
    width = len(edits[0].vector) if edits else 0
    projections: dict[tuple[int, ...], int] = {}
    reads: list[CompiledRead] = []
    for spec in captures:
        if not isinstance(spec.reduce, Projection) or not spec.reduce.in_engine:
            reads += _reads(spec, NO_PROJECTION)
            continue
        wide = spec.reduce.directions.shape[1]
        if width not in (0, wide):
            raise SteeringError(
                "capture.reduce.directions", f"are {wide} wide, but other vectors of the request {width}"
            )
        width = wide
        places = tuple(
            vectors.setdefault(digest, (len(vectors), data))[0]
            for digest, data in zip(spec.reduce.digests, spec.reduce.vectors, strict=True)
        )
        reads += _reads(spec, projections.setdefault(places, len(projections)))
    return Program(
        version=WIRE_VERSION,
        width=width,
        steps=tuple(steps),
        reads=_unique(reads),
        digests=tuple(vectors),
        vectors=tuple(memoryview(data) for _, data in vectors.values()),
        projections=tuple(projections),
    )


def _reads(spec: CaptureSpec, projection: int) -> list[CompiledRead]:
    return [
        CompiledRead(
            point=POINT_NAMES.index(point),
            layers=ALL_LAYERS if layers == "all" else tuple(layers),
            before=spec.before,
            tokens=spec.tokens.to_wire(),
            projection=projection,
        )
        for point, layers in spec.hooks
    ]


def _unique(reads: list[CompiledRead]) -> tuple[CompiledRead, ...]:
    return tuple({msgspec.msgpack.encode(read): read for read in reads}.values())

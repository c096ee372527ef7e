# SPDX-License-Identifier: Apache-2.0
"""A request's edits in the form that travels from the front end to every process of the engine.

A :class:`Program` is immutable and content-addressed: vectors appear once, by digest, as float32 bytes; equal edits
of two requests have equal digests, and so share vectors, rows and prefix-cache blocks in the engine.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import cached_property, lru_cache

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.instructions import CODES, KIND_OF, UNBOUNDED
from vllm_steer.spec import KINDS, CaptureSpec, Edit, Selector

WIRE_VERSION = 2
ALL_LAYERS: tuple[int, ...] = ()


class Step(msgspec.Struct, frozen=True, array_like=True):
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


class Read(msgspec.Struct, frozen=True, array_like=True):
    """One read, compiled: the stream at a point of some layers, on some tokens, ``before`` or after the edits there.

    What becomes of the rows (consumer, dtype, reduction) is the front end's business and is not part of the program.
    """

    point: int
    layers: tuple[int, ...]
    before: bool
    tokens: str | list[int | list[int | None]]

    @property
    def selector(self) -> Selector:
        return Selector.from_wire(self.tokens)


class Program(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All edits of one request, in the order in which they apply, and all its reads.

    ``vectors[i]`` holds ``width`` little-endian float32 values; ``digests[i]`` is their content digest.
    """

    version: int
    width: int
    steps: tuple[Step, ...]
    reads: tuple[Read, ...]
    digests: tuple[bytes, ...]
    vectors: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Program:
        """Decode; raises :class:`SteeringError` on anything that :meth:`to_bytes` did not write."""
        if not isinstance(data, bytes):
            raise SteeringError("extra_args.steer", "not a compiled program; use steering_vectors or steering instead")
        return _decode(data)

    def _check(self) -> None:
        """What the type cannot say about bytes that may come from a client of another version."""
        if self.version != WIRE_VERSION:
            raise SteeringError("extra_args.steer", f"wire version {self.version}, this engine reads {WIRE_VERSION}")
        sound = (
            len(self.digests) == len(self.vectors)
            and all(len(vector) == 4 * self.width for vector in self.vectors)
            and all(_digest(vector) == digest for vector, digest in zip(self.vectors, self.digests, strict=True))
            and all(
                step.code in KIND_OF
                and 0 <= step.point < len(POINT_NAMES)
                and 0 <= step.vector < len(self.vectors)
                and all(layer >= 0 for layer in step.layers)
                and np.isfinite([step.strength, step.low, step.high]).all()
                and step.digest == _step_digest(step, self.digests[step.vector])
                for step in self.steps
            )
        )
        if not sound or not all(np.isfinite(self.vector(i)).all() for i in range(len(self.vectors))):
            raise SteeringError(
                "extra_args.steer", "the program's parts do not fit together; build it with this package"
            )
        if not all(
            0 <= read.point < len(POINT_NAMES) and all(layer >= 0 for layer in read.layers) for read in self.reads
        ):
            raise SteeringError("extra_args.steer", "a read is of no point or layer; build it with this package")
        for tokens in (*(step.tokens for step in self.steps), *(read.tokens for read in self.reads)):
            Selector.from_wire(tokens)

    def without_reads(self) -> Program:
        """The same edits and no read."""
        return msgspec.structs.replace(self, reads=())

    def vector(self, index: int) -> np.ndarray:
        """Vector ``index`` as float32 ``[width]``, read-only."""
        return np.frombuffer(self.vectors[index], dtype="<f4")

    @cached_property
    def by_digest(self) -> dict[bytes, int]:
        return {digest: index for index, digest in enumerate(self.digests)}


# One request's bytes are read several times on their way (checks, scheduler, worker), many requests' are equal.
@lru_cache(maxsize=64)
def _decode(data: bytes) -> Program:
    try:
        program = msgspec.msgpack.decode(data, type=Program)
    except msgspec.MsgspecError as error:
        raise SteeringError("extra_args.steer", f"not a compiled program ({error})") from None
    program._check()
    return program


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _step_digest(step: Step, vector_digest: bytes) -> bytes:
    """Content of one edit less its selector: the same edit on other tokens has the same digest."""
    head = struct.pack("<BBddd", step.code, step.point, step.strength, step.low, step.high)
    return _digest(head + np.asarray(step.layers, dtype="<i4").tobytes() + vector_digest)


def compile_program(edits: Sequence[Edit], captures: Sequence[CaptureSpec] = ()) -> Program:
    """The program of ``edits``, which apply in the order given, and of the reads of ``captures``.

    Edits of strength 0 change nothing and are left out; equal reads appear once.
    """
    steps: list[Step] = []
    vectors: dict[bytes, tuple[int, bytes]] = {}
    for edit in edits:
        if edit.strength == 0.0:
            continue
        vector = np.ascontiguousarray(edit.vector, dtype="<f4")
        if KINDS[edit.kind].needs_direction:
            wide = vector.astype(np.float64)
            vector = np.ascontiguousarray(wide / np.linalg.norm(wide), dtype="<f4")
        data = vector.tobytes()
        digest = _digest(data)
        index, _ = vectors.setdefault(digest, (len(vectors), data))
        step = Step(
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
        steps.append(msgspec.structs.replace(step, digest=_step_digest(step, digest)))
    return Program(
        version=WIRE_VERSION,
        width=len(edits[0].vector) if edits else 0,
        steps=tuple(steps),
        reads=_unique([read for spec in captures for read in _reads(spec)]),
        digests=tuple(vectors),
        vectors=tuple(data for _, data in vectors.values()),
    )


def _reads(spec: CaptureSpec) -> list[Read]:
    return [
        Read(
            point=POINT_NAMES.index(point),
            layers=ALL_LAYERS if layers == "all" else tuple(layers),
            before=spec.before,
            tokens=spec.tokens.to_wire(),
        )
        for point, layers in spec.hooks
    ]


def _unique(reads: list[Read]) -> tuple[Read, ...]:
    return tuple({msgspec.msgpack.encode(read): read for read in reads}.values())

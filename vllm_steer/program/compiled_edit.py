# SPDX-License-Identifier: Apache-2.0
"""Compiled edits of a program."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.program.instructions import CODES
from vllm_steer.program.part import CompiledPart
from vllm_steer.program.records import CompiledCondition
from vllm_steer.request import Selector, content_digest
from vllm_steer.request.selector import Wire

WIRE_VERSION = 11
"""Version of the wire form of programs."""

_ALL = Selector("all").to_wire()


class CompiledFeature(msgspec.Struct, frozen=True, array_like=True):
    """A feature of an autoencoder; ``bias`` and ``threshold`` are those of :class:`.feature.FeatureVectors`."""

    sae: str
    index: int
    sets: bool
    """Whether the activation is set to the edit's ``low``. Otherwise, the strength contains what is added."""
    bias: float = 0.0
    threshold: float = 0.0
    omitted: tuple[str, ...] = ()
    """Of `point` and `layer`, those that are the autoencoder's, until the request is composed."""


class CompiledEdit(msgspec.Struct, frozen=True, array_like=True):
    """One edit: what to compute, where, with which vector, on which tokens.

    ``vector`` is an index into the program's vectors. ``digest`` covers the content of the edit without its tokens and
    without the readouts that its conditions refer to.

    An edit with a matrix has ``num_rows`` rows, one for each of its positions; otherwise ``num_rows`` is 0. ``rows``
    are the indices of the matrix's rows. An edit of a subspace has no rows: ``basis`` are the indices of an orthonormal
    basis, and ``coordinates`` the float32 coordinates of the vector or rows in it, ``[k, num_rows or 1]``.
    """

    code: int
    point: int
    layers: tuple[int, ...]
    vector: int
    strength: float
    low: float
    high: float
    tokens: Wire
    digest: bytes
    when: tuple[CompiledCondition, ...] = ()
    live: str = ""
    num_rows: int = 0
    rows: tuple[int, ...] = ()
    basis: tuple[int, ...] = ()
    coordinates: bytes = b""
    feature: CompiledFeature | None = None
    """Of an edit of a feature. Its rows are the encoder's, with ``set`` only, and the decoder's; none at first."""
    parts: tuple[CompiledPart, ...] = ()
    """Parts of the output to which the edit is restricted; a token must be in all of them."""

    @property
    def is_gated(self) -> bool:
        """Whether a factor in the records of its tokens decides about the edit."""
        return bool(self.when or self.parts)

    @property
    def is_uniform(self) -> bool:
        """Whether the edit treats all tokens of a request alike, whether they are of the prompt or generated."""
        return self.tokens == _ALL and not (self.is_gated or self.live or self.num_rows)

    @property
    def selector(self) -> Selector:
        """The tokens that are edited."""
        return Selector.from_wire(self.tokens)

    @property
    def vectors(self) -> tuple[int, ...]:
        """Indices of all vectors of the edit."""
        return self.basis or self.rows or (() if self.feature else (self.vector,))

    @property
    def is_pending(self) -> bool:
        """Whether the vectors of a feature are still missing."""
        return self.feature is not None and not self.rows

    def coordinate_array(self) -> npt.NDArray[np.float32]:
        """Return the coordinates, ``[k, num_rows or 1]``."""
        return np.frombuffer(self.coordinates, "<f4").reshape(len(self.basis), -1)

    def with_strength(self, strength: float, digests: Sequence[bytes]) -> CompiledEdit:
        """Return the edit at another strength; ``digests`` are those of the program's vectors."""
        return msgspec.structs.replace(self, strength=strength, digest=edit_digest(self, strength, digests))

    def moved(self, places: Sequence[int]) -> CompiledEdit:
        """Return the edit with ``places[i]`` as the index of vector ``i``."""
        return msgspec.structs.replace(
            self,
            vector=self.vector if self.is_pending else places[self.vector],
            rows=tuple(places[index] for index in self.rows),
            basis=tuple(places[index] for index in self.basis),
        )

    @property
    def is_sound(self) -> bool:
        """Whether the parts of a matrix or subspace fit together."""
        if self.code == CODES["feature"] and self.feature is not None:
            sizes = (0, 1 + self.feature.sets)
            return len(self.rows) in sizes and not (self.num_rows or self.basis or self.coordinates)
        if self.feature is not None or self.code == CODES["feature"]:
            return False
        if self.code != CODES["replace"]:
            return not (self.num_rows or self.rows or self.basis or self.coordinates)
        if self.basis:
            return not self.rows and len(self.coordinates) == 4 * len(self.basis) * (self.num_rows or 1)
        return len(self.rows) == self.num_rows and not self.coordinates


def edit_digest(edit: CompiledEdit, strength: float, digests: Sequence[bytes]) -> bytes:
    """Return the digest of an edit's content. Tokens are left out: they select where the same edit applies."""
    # The version is included because the meaning of a point's number depends on it.
    head = struct.pack("<BBBddd", WIRE_VERSION, edit.code, edit.point, strength, edit.low, edit.high)
    content = (
        head + struct.pack(f"<{len(edit.layers)}i", *edit.layers) + (b"" if edit.is_pending else digests[edit.vector])
    )
    if edit.feature:
        content += msgspec.msgpack.encode((edit.feature, [digests[index] for index in edit.rows]))
    if edit.when or edit.live:
        content += msgspec.msgpack.encode((edit.when, edit.live))
    if edit.parts:
        content += msgspec.msgpack.encode(edit.parts)
    if edit.num_rows or edit.basis:
        vectors = [digests[index] for index in edit.vectors]
        content += msgspec.msgpack.encode((edit.num_rows, bool(edit.basis), vectors, edit.coordinates))
    return content_digest(content)

# SPDX-License-Identifier: Apache-2.0
"""Compiled edits of a program."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.program.compiled_part import CompiledPart
from vllm_steer.program.instructions import KIND_OF
from vllm_steer.program.records import CompiledCondition
from vllm_steer.request import KINDS, Selector, content_digest
from vllm_steer.request.selector import Wire

WIRE_VERSION = 12
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

    ``vectors`` are indices into the program's vectors: one, the rows of a matrix, a basis, or those of a feature, the
    encoder with ``set`` and the decoder; none until they are filled in. ``digest`` covers the content of the edit
    without its tokens and without the readouts that its conditions refer to.

    An edit with a matrix has ``num_rows`` rows, one for each of its positions; otherwise ``num_rows`` is 0. An edit of
    a subspace has as ``vectors`` an orthonormal basis, and as ``coordinates`` the float32 coordinates of its vector or
    rows in the basis, ``[k, num_rows or 1]``.
    """

    code: int
    point: int
    layers: tuple[int, ...]
    vectors: tuple[int, ...]
    strength: float
    low: float
    high: float
    tokens: Wire
    digest: bytes
    when: tuple[CompiledCondition, ...] = ()
    live: str = ""
    num_rows: int = 0
    coordinates: bytes = b""
    feature: CompiledFeature | None = None
    """The feature that is edited; None for edits of vectors."""
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
    def is_pending(self) -> bool:
        """Whether the vectors of a feature are still missing."""
        return not self.vectors

    def coordinate_array(self) -> npt.NDArray[np.float32]:
        """Return the coordinates, ``[k, num_rows or 1]``."""
        return np.frombuffer(self.coordinates, "<f4").reshape(len(self.vectors), -1)

    def with_strength(self, strength: float, digests: Sequence[bytes]) -> CompiledEdit:
        """Return the edit at another strength; ``digests`` are those of the program's vectors."""
        return msgspec.structs.replace(self, strength=strength, digest=edit_digest(self, strength, digests))

    def moved(self, places: Sequence[int]) -> CompiledEdit:
        """Return the edit with ``places[i]`` as the index of vector ``i``."""
        return msgspec.structs.replace(self, vectors=tuple(places[index] for index in self.vectors))

    @property
    def is_sound(self) -> bool:
        """Whether vectors, rows, coordinates and feature fit the kind and each other."""
        kind = KINDS[KIND_OF[self.code]]
        if (self.feature is None) != bool(kind.vectors) or not (kind.takes_matrix or not self.num_rows):
            return False
        if self.feature is not None:
            return len(self.vectors) in (0, 1 + self.feature.sets) and not self.coordinates
        if self.coordinates:
            return "subspace" in kind.params and len(self.coordinates) == 4 * len(self.vectors) * (self.num_rows or 1)
        return len(self.vectors) == (self.num_rows or len(kind.vectors))


def edit_digest(edit: CompiledEdit, strength: float, digests: Sequence[bytes]) -> bytes:
    """Return the digest of an edit's content. Tokens are left out: they select where the same edit applies."""
    # The version is included because the meaning of a point's number depends on it.
    what = (
        WIRE_VERSION, edit.code, edit.point, strength, edit.low, edit.high, edit.layers, edit.feature, edit.num_rows,
    )  # fmt: skip
    vectors = [digests[index] for index in edit.vectors]
    return content_digest(msgspec.msgpack.encode((what, vectors, edit.coordinates, edit.when, edit.live, edit.parts)))

# SPDX-License-Identifier: Apache-2.0
"""The instructions that the tokens of one segment run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec

from vllm_steer.points import POINT_NAMES
from vllm_steer.program.instructions import CAPTURE
from vllm_steer.program.program import CompiledCapture, CompiledEdit

N_POINTS = len(POINT_NAMES)
NO_VECTOR = UNPROJECTED = b""


class Instruction(msgspec.Struct, frozen=True):
    """One operation at one site, as stored in the device tables.

    ``vector`` is a digest. For a CAPTURE, ``index`` is the index of the captured row within its token.
    """

    site_number: int
    code: int
    vector: bytes
    strength: float
    low: float
    high: float
    index: int = 0


class CaptureSite(msgspec.Struct, frozen=True):
    """A row that a token captures: the stream at a site, before or after the edits of the site."""

    site_number: int
    before: bool

    @property
    def code(self) -> int:
        """The number that identifies the row in transfers."""
        return 2 * self.site_number + self.before


@dataclass(frozen=True)
class RowFormat:
    """A format in which captured rows of a token leave the engine: unprojected, or projected on directions."""

    projection: bytes
    """Digest of the projection, or :data:`UNPROJECTED`."""
    directions: tuple[bytes, ...]
    """Digests of the directions."""
    indices: tuple[int, ...]
    """Indices of the rows among those that the token captures."""
    codes: tuple[int, ...]
    """:attr:`CaptureSite.code` of each row."""

    def num_bytes(self, row_bytes: int) -> int:
        """Return the bytes of one token; ``row_bytes`` is the size of an unprojected row."""
        return len(self.codes) * (4 * len(self.directions) or row_bytes)


@dataclass(frozen=True)
class TokenProgram:
    """Edits and captures of each token of a segment. Equal content has an equal digest in all requests."""

    digest: bytes
    edits: tuple[CompiledEdit, ...]
    vectors: tuple[bytes, ...]
    """Digests of the vectors it needs on the device: one per edit, then the directions of projections."""
    captures: tuple[CaptureSite, ...]
    layers: range
    """Layers of this pipeline stage."""
    row_formats: tuple[RowFormat, ...] = ()

    @cached_property
    def num_instructions(self) -> int:
        """Number of :attr:`instructions`."""
        return sum(len(layers_of(edit, self.layers)) for edit in self.edits) + len(self.captures)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions, in order of execution within each site; site numbers are ``layer * N_POINTS + point``."""
        captures = [
            (captured.before, Instruction(captured.site_number, CAPTURE, NO_VECTOR, 0.0, 0.0, 0.0, index))
            for index, captured in enumerate(self.captures)
        ]
        edits = [
            Instruction(layer * N_POINTS + edit.point, edit.code, vector, edit.strength, edit.low, edit.high)
            for edit, vector in zip(self.edits, self.vectors, strict=False)
            for layer in layers_of(edit, self.layers)
        ]
        before = [instruction for is_before, instruction in captures if is_before]
        after = [instruction for is_before, instruction in captures if not is_before]
        return (*before, *edits, *after)


def layers_of(part: CompiledEdit | CompiledCapture, layers: range) -> range | tuple[int, ...]:
    """Return the layers of an edit or capture that are in ``layers``."""
    return tuple(layer for layer in part.layers if layer in layers) if part.layers else layers

# SPDX-License-Identifier: Apache-2.0
"""The instructions that the tokens of one segment run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec

from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_capture import CompiledCapture
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.instructions import CAPTURE, GATE, READ
from vllm_steer.program.position_runs import NO_RUN, EditStep, PositionRun

N_POINTS = len(POINT_NAMES)
NO_VECTOR = UNPROJECTED = b""


class Instruction(msgspec.Struct, frozen=True):
    """One operation at one site, as stored in the device tables.

    ``vector`` is a digest. ``index`` is the index of a CAPTURE's row within its token, the column of a READ's
    value, and the columns of a GATE's readout and factor, packed by :func:`pack_columns`. For an edit, it holds the
    columns of the two factors that scale it, packed likewise, each 0 for none. ``strength``, ``low`` and ``high`` are
    the bias of a READ and, as ``low``, 1 for a sigmoid plus 2 for a cosine. Those of a GATE are
    the threshold, the sign and the sharpness.
    """

    site_number: int
    code: int
    vector: bytes
    strength: float
    low: float
    high: float
    index: int = 0
    run: int = NO_RUN
    """Number of the token program's run that holds the operands of an edit; :data:`NO_RUN` for none."""


def pack_columns(first: int, second: int) -> int:
    """Return two columns of a record as one number."""
    return first | second << 16


class Read(msgspec.Struct, frozen=True):
    """A product of the stream at a site with a vector, recorded in a column."""

    site_number: int
    column: int
    vector: bytes
    bias: float
    form: float
    """See ``CompiledReadout.form``."""


class Gate(msgspec.Struct, frozen=True):
    """A condition on a recorded value of the same token, which scales a factor."""

    site_number: int
    score: int
    target: int
    threshold: float
    sign: float
    sharpness: float


class MlpRead(msgspec.Struct, frozen=True):
    """A probe with a hidden layer, whose weights are vectors; see ``CompiledReadout``."""

    vectors: tuple[bytes, ...]
    biases: bytes
    outputs: bytes
    bias: float
    activation: str
    sigmoid: bool


class HeadRead(msgspec.Struct, frozen=True):
    """Outputs of a head on the stream at a site, recorded from a column on; see ``CompiledReadout``.

    Those are the indices and values of the ``top_k`` largest outputs, or of ``targets``, or the value of a probe.
    """

    site_number: int
    column: int
    head: str
    top_k: int
    mlp: MlpRead | None = None
    targets: tuple[int, ...] = ()


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
    """Digests of the vectors it needs on the device: of edits, then the directions of projections and readouts."""
    captures: tuple[CaptureSite, ...]
    layers: range
    """Layers of this pipeline stage."""
    row_formats: tuple[RowFormat, ...] = ()
    reads: tuple[Read, ...] = ()
    gates: tuple[Gate, ...] = ()
    factors: tuple[int, ...] = ()
    """Packed columns of the factors of each edit; empty if no edit has any."""
    steps: tuple[tuple[EditStep, ...], ...] = ()
    """Steps of each edit."""
    runs: tuple[PositionRun, ...] = ()
    """Operands of edits with a matrix, from the segment's first position on."""
    heads: tuple[tuple[HeadRead, int], ...] = ()
    """Heads, each with the index of its row among those that the token captures."""

    @cached_property
    def num_instructions(self) -> int:
        """Number of :attr:`instructions`."""
        edits = sum(
            len(layers_of(edit, self.layers)) * len(steps) for edit, steps in zip(self.edits, self.steps, strict=True)
        )
        return edits + len(self.captures) + len(self.reads) + len(self.gates)

    @cached_property
    def num_matrix_rows(self) -> int:
        """Number of operands in :attr:`runs`."""
        return sum(map(len, self.runs))

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions, in order of execution within each site; site numbers are ``layer * N_POINTS + point``."""
        captures = [
            (captured.before, Instruction(captured.site_number, CAPTURE, NO_VECTOR, 0.0, 0.0, 0.0, index))
            for index, captured in enumerate(self.captures)
        ]
        factors = self.factors or (0,) * len(self.edits)
        edits = [
            Instruction(
                layer * N_POINTS + edit.point,
                step.code,
                step.vector,
                edit.strength,
                step.low,
                step.high,
                columns,
                step.run,
            )
            for edit, steps, columns in zip(self.edits, self.steps, factors, strict=True)
            for layer in layers_of(edit, self.layers)
            for step in steps
        ]
        reads = [
            Instruction(read.site_number, READ, read.vector, read.bias, read.form, 0.0, read.column)
            for read in self.reads
        ]
        gates = [
            Instruction(
                gate.site_number,
                GATE,
                NO_VECTOR,
                gate.threshold,
                gate.sign,
                gate.sharpness,
                pack_columns(gate.score, gate.target),
            )
            for gate in self.gates
        ]
        before = [instruction for is_before, instruction in captures if is_before]
        after = [instruction for is_before, instruction in captures if not is_before]
        return (*before, *edits, *after, *reads, *gates)


def layers_of(part: CompiledEdit | CompiledCapture, layers: range) -> range | tuple[int, ...]:
    """Return the layers of an edit or capture that are in ``layers``."""
    return tuple(layer for layer in part.layers if layer in layers) if part.layers else layers

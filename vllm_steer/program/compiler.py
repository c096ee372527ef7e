# SPDX-License-Identifier: Apache-2.0
"""Compilation of edits and capture specs to a program."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.instructions import CODES, UNBOUNDED
from vllm_steer.program.program import (
    ALL_LAYERS,
    NO_PROJECTION,
    WIRE_VERSION,
    CompiledCapture,
    CompiledEdit,
    Program,
)
from vllm_steer.spec import KINDS, CaptureSpec, Edit, Projection, bytes_of, content_digest
from vllm_steer.spec.sites import Layers


def compile_program(
    edits: Sequence[Edit],
    captures: Sequence[CaptureSpec] = (),
    *,
    edit_paths: Sequence[str] = (),
    capture_paths: Sequence[str] = (),
) -> Program:
    """Compile edits and capture specs.

    Edits of strength 0 change nothing and are left out. Equal captures appear once.

    Args:
        edits: the edits, in the order in which they apply.
        captures: the capture specs.
        edit_paths: path of each edit in the request, for error messages.
        capture_paths: path of each capture spec in the request.

    Raises:
        SteeringError: the directions of a capture differ in width from the vectors of the edits or of another capture.
    """
    vectors = _VectorTable(len(edits[0].vector) if edits else 0)
    compiled_edits: dict[int, CompiledEdit] = {
        number: _compile_edit(edit, vectors) for number, edit in enumerate(edits) if edit.strength != 0.0
    }
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
    return Program(
        version=WIRE_VERSION,
        width=vectors.width,
        edits=tuple(compiled_edits.values()),
        captures=tuple(capture for capture, _ in compiled_captures.values()),
        digests=tuple(vectors.entries),
        vectors=tuple(memoryview(data) for _, data in vectors.entries.values()),
        projections=tuple(projections),
        sources=sources,
    )


class _VectorTable:
    """Distinct vectors by digest, with the index and the float32 bytes of each."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.entries: dict[bytes, tuple[int, bytes]] = {}

    def add(self, digest: bytes, data: bytes) -> int:
        """Return the index of a vector; add it if it is new."""
        return self.entries.setdefault(digest, (len(self.entries), data))[0]

    def add_directions(self, projection: Projection, path: str) -> tuple[int, ...]:
        """Return the indices of a projection's directions; raise SteeringError for ``path`` if their width differs."""
        width = projection.directions.shape[1]
        if self.width not in (0, width):
            raise SteeringError(
                path,
                f"have width {width}, but other vectors of the request have width {self.width}; "
                "all vectors have the model's hidden size",
            )
        self.width = width
        return tuple(map(self.add, projection.digests, projection.vectors))


def _compile_edit(edit: Edit, vectors: _VectorTable) -> CompiledEdit:
    vector = edit.vector
    if KINDS[edit.kind].needs_direction:
        wide = vector.astype(np.float64)
        vector = np.ascontiguousarray(wide / np.linalg.norm(wide), dtype="<f4")
    data = bytes_of(vector)
    digest = content_digest(data)
    compiled = CompiledEdit(
        code=CODES[edit.kind],
        point=POINT_NAMES.index(edit.point),
        layers=_compile_layers(edit.layers),
        vector=vectors.add(digest, data),
        strength=float(edit.strength),
        low=-UNBOUNDED if edit.low is None else float(edit.low),
        high=UNBOUNDED if edit.high is None else float(edit.high),
        tokens=edit.tokens.to_wire(),
        digest=b"",
    )
    return compiled.with_strength(compiled.strength, digest)


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


def _compile_layers(layers: Layers) -> tuple[int, ...]:
    return ALL_LAYERS if layers == "all" else tuple(layers)

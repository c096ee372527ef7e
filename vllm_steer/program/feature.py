# SPDX-License-Identifier: Apache-2.0
"""Compiled edits of features: the front end fills in their vectors, from the files of the autoencoder."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.program import Program
from vllm_steer.spec import bytes_of, content_digest


class FeatureVectors(msgspec.Struct, frozen=True):
    """One feature: ``a = x.encoder + bias`` if that is above ``threshold`` and 0 otherwise, times ``decoder``."""

    decoder: npt.NDArray[np.float32]
    """``[hidden]``."""
    encoder: npt.NDArray[np.float32]
    """``[hidden]``; empty if the activation depends on other features."""
    bias: float = 0.0
    threshold: float = 0.0
    problem: str = ""
    """Why the activation cannot be set."""


def with_features(program: Program, find: Callable[[str, int, str], FeatureVectors]) -> Program:
    """Return the program with the vectors of the features that its edits name.

    Args:
        program: The program.
        find: Returns a feature of an autoencoder. It gets the autoencoder's name, the feature's number, and the path of
            the edit.

    Raises:
        SteeringError: A feature does not exist, cannot be set, or has another width than vectors of the request.
    """
    vectors = dict(zip(program.digests, program.vectors, strict=True))
    width = program.width if program.vectors else 0
    found: list[FeatureVectors | None] = []
    rows: list[list[bytes]] = []
    for number, edit in enumerate(program.edits):
        if edit.feature is None or edit.rows:
            found.append(None)
            rows.append([])
            continue
        source = program.edit_source(number)
        each = find(edit.feature.sae, edit.feature.index, source)
        if edit.feature.sets and each.problem:
            raise SteeringError(f"{source}.set", each.problem)
        if width not in (0, len(each.decoder)):
            raise SteeringError(
                f"{source}.sae", f"has width {len(each.decoder)}, but other vectors of the request have width {width}"
            )
        width = len(each.decoder)
        data = [bytes_of(vector) for vector in ((each.encoder, each.decoder) if edit.feature.sets else (each.decoder,))]
        rows.append([content_digest(row) for row in data])
        vectors.update((digest, memoryview(row)) for digest, row in zip(rows[-1], data, strict=True))
        found.append(each)
    places = {digest: place for place, digest in enumerate(vectors)}
    digests = tuple(vectors)
    edits = [
        edit if each is None else _filled(edit, each, tuple(places[digest] for digest in own), digests)
        for edit, each, own in zip(program.edits, found, rows, strict=True)
    ]
    return msgspec.structs.replace(
        program, width=width, digests=digests, vectors=tuple(vectors.values()), edits=tuple(edits)
    )


def _filled(
    edit: CompiledEdit, vectors: FeatureVectors, rows: tuple[int, ...], digests: tuple[bytes, ...]
) -> CompiledEdit:
    if edit.feature is None:
        return edit
    feature = edit.feature
    if feature.sets:
        feature = msgspec.structs.replace(feature, bias=vectors.bias, threshold=vectors.threshold)
    filled = msgspec.structs.replace(edit, vector=rows[-1], rows=rows, feature=feature)
    return filled.with_strength(edit.strength, digests)

# SPDX-License-Identifier: Apache-2.0
"""Features of autoencoders: the front end fills in the sites and vectors of edits and readouts from the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.compiler import check_order
from vllm_steer.program.dynamic import SAE_PREFIX
from vllm_steer.program.program import Program
from vllm_steer.request import bytes_of, content_digest
from vllm_steer.request.feature import ANY_SITE_FLAG


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


class SaeSite(msgspec.Struct, frozen=True):
    """The place for which an autoencoder was made; None where its files do not tell."""

    name: str = ""
    """In the words of the files; empty if they name no place."""
    point: PointName | None = None
    layer: int | None = None
    known: bool = True
    """Whether the name, if there is one, belongs to a hook point."""
    exact: bool = False
    """Whether the name means exactly one site in every model."""

    def matches(self, point: PointName | None, layers: Sequence[int] | None) -> bool:
        """Return whether a point and layers, of which None is not compared, can be this site; () means all layers."""
        if not self.known:
            return False
        if point is None or layers is None or self.point is None or self.layer is None:
            same_point = None in (point, self.point) or point == self.point
            return same_point and (None in (layers, self.layer) or tuple(layers or ()) == (self.layer,))
        return len(layers) == 1 and _place(point, layers[0]) == _place(self.point, self.layer)


def _place(point: PointName, layer: int) -> tuple[PointName, int]:
    """Return the place in the stream of a site: the beginning of a block is the end of the block before it."""
    return ("post_block", layer - 1) if point == "pre_attn" and layer > 0 else (point, layer)


def with_sites(program: Program, find: Callable[[str, str], SaeSite], *, any_site: bool) -> Program:
    """Return the program with the sites that its edits and readouts of autoencoders leave out.

    Args:
        program: The program.
        find: Returns the site of an autoencoder. It gets the autoencoder's name and the path of the edit or readout.
        any_site: Whether an autoencoder is served at other sites than its own.

    Raises:
        SteeringError: An edit or readout is at another site than its autoencoder, or no file names the site.
    """
    edits = []
    for number, edit in enumerate(program.edits):
        if edit.feature is not None:
            source, feature = program.edit_source(number), edit.feature
            given = _given(edit.point, edit.layers, feature.omitted)
            point, layers = _placed(find(feature.sae, source), feature.sae, given, f"{source}.layers", any_site)
            feature = msgspec.structs.replace(feature, omitted=())
            edit = msgspec.structs.replace(edit, point=point, layers=layers, feature=feature)
        edits.append(edit)
    readouts = []
    for number, readout in enumerate(program.readouts):
        if readout.head.startswith(SAE_PREFIX):
            source, sae = program.readout_source(number), readout.head.removeprefix(SAE_PREFIX)
            given = _given(readout.point, readout.layers, readout.omitted)
            point, layers = _placed(find(sae, source), sae, given, f"{source}.layer", any_site)
            readout = msgspec.structs.replace(readout, point=point, layer=layers[0], layers=layers, omitted=())
        readouts.append(readout)
    filled = msgspec.structs.replace(program, edits=tuple(edits), readouts=tuple(readouts))
    check_order(filled)
    return filled


_Given = tuple[PointName | None, tuple[int, ...] | None]


def _given(point: int, layers: tuple[int, ...], omitted: Sequence[str]) -> _Given:
    return None if "point" in omitted else POINT_NAMES[point], None if "layer" in omitted else layers


def _placed(site: SaeSite, sae: str, given: _Given, field: str, any_site: bool) -> tuple[int, tuple[int, ...]]:
    """Return the number of the point, and the layers, of an edit or a readout with the path of its layers."""
    point, layers = given
    source, _, key = field.rpartition(".")
    if not any_site and given != (None, None) and not site.matches(*given):
        where = None if layers is None else f"layer {', '.join(map(str, layers))}" if layers else "all layers"
        here = " of ".join(part for part in (point, where) if part)
        is_ours = site.point is not None and site.layer is not None
        meaning = f" ({site.point} of layer {site.layer})" if is_ours else ""
        raise SteeringError(
            f"{source}.point" if point else field,
            f"is {here}, but the autoencoder {sae!r} was made for {site.name}{meaning}; "
            + (f"omit point and {key}, or " if site.exact else "")
            + f"start the engine with {ANY_SITE_FLAG}",
        )
    if point is None:
        if site.point is None or not site.exact:
            raise SteeringError(f"{source}.point", _unnamed(sae, site))
        point = site.point
    if layers is None:
        if site.layer is None:
            raise SteeringError(field, _unnamed(sae, site))
        layers = (site.layer,)
    return POINT_NAMES.index(point), layers


def _unnamed(sae: str, site: SaeSite) -> str:
    named = f"name {site.name}, which is not exactly a site here" if site.name else "do not name its site"
    return f"is missing, and the files of the autoencoder {sae!r} {named}; give it"


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

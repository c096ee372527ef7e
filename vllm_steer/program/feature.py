# SPDX-License-Identifier: Apache-2.0
"""Features of autoencoders as programs use them, and the sites for which autoencoders were made."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.request.references import ANY_SITE_FLAG


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

    def place(
        self, sae: str, number: int, given: tuple[int, ...], omitted: Sequence[str], field: str, *, any_site: bool
    ) -> tuple[int, tuple[int, ...]]:
        """Return the number of the point, and the layers, of an edit or a readout of this autoencoder.

        Args:
            sae: Name of the autoencoder.
            number: Number of the point; without a meaning if ``point`` is omitted.
            given: Layers; without a meaning if ``layer`` is omitted.
            omitted: Of ``point`` and ``layer``, those that the request leaves out.
            field: Path of the layers.
            any_site: Whether the autoencoder is served at other sites than this one.

        Raises:
            SteeringError: The request names another site than this one, or neither names a site.
        """
        point = None if "point" in omitted else POINT_NAMES[number]
        layers = None if "layer" in omitted else given
        source, _, key = field.rpartition(".")
        if not any_site and (point, layers) != (None, None) and not self.matches(point, layers):
            where = None if layers is None else f"layer {', '.join(map(str, layers))}" if layers else "all layers"
            here = " of ".join(part for part in (point, where) if part)
            meaning = "" if None in (self.point, self.layer) else f" ({self.point} of layer {self.layer})"
            raise SteeringError(
                f"{source}.point" if point else field,
                f"is {here}, but the autoencoder {sae!r} was made for {self.name}{meaning}; "
                + (f"omit point and {key}, or " if self.exact else "")
                + f"start the engine with {ANY_SITE_FLAG}",
            )
        named = f"name {self.name}, which is not exactly a site here" if self.name else "do not name its site"
        missing = f"is missing, and the files of the autoencoder {sae!r} {named}; give it"
        if point is None:
            if self.point is None or not self.exact:
                raise SteeringError(f"{source}.point", missing)
            point = self.point
        if layers is None:
            if self.layer is None:
                raise SteeringError(field, missing)
            layers = (self.layer,)
        return POINT_NAMES.index(point), layers


def _place(point: PointName, layer: int) -> tuple[PointName, int]:
    """Return the place in the stream of a site: the beginning of a block is the end of the block before it."""
    return ("post_block", layer - 1) if point == "pre_attn" and layer > 0 else (point, layer)

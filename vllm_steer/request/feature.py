# SPDX-License-Identifier: Apache-2.0
"""Edits of one feature of a sparse autoencoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_SAE_FEATURES
from vllm_steer.request.references import read_name
from vllm_steer.request.scalars import is_integer, read_number, shown
from vllm_steer.request.vector import Vector

ANY_SITE_FLAG = "--steering-sae-any-site"
PARAMETERS = ("sae", "feature", "set", "add")


@dataclass(frozen=True)
class FeatureEdit:
    """The feature that an edit changes, and how."""

    sae: str
    """Name of an autoencoder of the engine."""
    feature: int
    set: float | None
    """New activation; None to add."""
    add: float | None
    """Added to the activation; None to set it."""


def read_feature_edit(sae: object, feature: object, new: object, added: object) -> FeatureEdit:
    """Return the checked parameters of an edit of the kind ``feature``.

    Raises:
        SteeringError: A value is invalid or missing.
    """
    if sae is None:
        raise SteeringError("sae", "is missing; name an autoencoder of the engine (--steering-sae NAME=FOLDER)")
    if not is_integer(feature) or not 0 <= feature < MAX_SAE_FEATURES:
        raise SteeringError("feature", f"must be the number of a feature, from 0, not {shown(feature)}")
    if (new is None) == (added is None):
        raise SteeringError("set", "give either set or add, and only one of them")
    return FeatureEdit(
        read_name(sae, "sae"),
        int(feature),
        None if new is None else read_number(new, "set"),
        None if added is None else read_number(added, "add"),
    )


def no_vector() -> Vector:
    """Return the vector of an edit whose vectors come from an autoencoder: it is empty."""
    empty = np.empty(0, dtype=np.float32)
    empty.flags.writeable = False
    return empty

# SPDX-License-Identifier: Apache-2.0
"""Single features of an engine's autoencoders, for edits."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
from cachetools import LRUCache

from vllm_steer.errors import SteeringError
from vllm_steer.models.centring import Centring
from vllm_steer.models.sae import read_feature
from vllm_steer.models.sae_site import read_site
from vllm_steer.program.feature import FeatureVectors, SaeSite
from vllm_steer.request.scalars import FLOAT32_MAX
from vllm_steer.taps.sparse_encoder import FloatArray, SparseEncoder

_MAX_CACHED = 1024
"""Features kept in the memory of a front end, each two vectors."""
_NEEDS_ALL = (
    "the activation of one feature of a TopK autoencoder depends on all others, so it cannot be set; use add, or an "
    "autoencoder with ReLU, JumpReLU or gates"
)


class FeatureReader:
    """Reads features from the folders of the engine's autoencoders.

    Args:
        folders: Folder of each autoencoder by name.
        centring: How the setting ``center_writing_weights`` of an autoencoder changes rows of the engine's model.
        any_site: Whether autoencoders are served at other sites than those that their files name.
    """

    def __init__(self, folders: Mapping[str, str], centring: Centring = "unknown", *, any_site: bool = False) -> None:
        self._folders, self._centring, self.any_site = folders, centring, any_site
        self._sites: dict[str, SaeSite] = {}
        self._cache: LRUCache[tuple[str, int], FeatureVectors] = LRUCache(_MAX_CACHED)
        self._lock = threading.Lock()

    def site(self, sae: str, field: str) -> SaeSite:
        """Return the site of an autoencoder; raise SteeringError if the engine has none of that name."""
        self._check_name(sae, field)
        with self._lock:
            if sae not in self._sites:
                self._sites[sae] = read_site(self._folders[sae], f"{field}.sae")
            return self._sites[sae]

    def _check_name(self, sae: str, field: str) -> None:
        if sae not in self._folders:
            known = ", ".join(sorted(self._folders)) or "none (--steering-sae NAME=FOLDER)"
            raise SteeringError(f"{field}.sae", f"no autoencoder is called {sae!r}; this engine has: {known}")

    def feature(self, sae: str, index: int, field: str) -> FeatureVectors:
        """Return a feature.

        Args:
            sae: Name of the autoencoder.
            index: Number of the feature.
            field: Path of the edit, for errors.

        Raises:
            SteeringError: The engine has no such autoencoder, or it has no such feature.
        """
        self._check_name(sae, field)
        with self._lock:
            cached: FeatureVectors | None = self._cache.get((sae, index))
        if cached is None:
            with np.errstate(over="ignore"):
                cached = _vectors(*read_feature(self._folders[sae], index, f"{field}.feature", self._centring))
            weights = float(np.abs(cached.encoder).max(initial=0.0))
            if max(abs(cached.bias), cached.threshold, weights) > FLOAT32_MAX:
                raise SteeringError(f"{field}.feature", f"the encoder of feature {index} of {sae} overflows float32")
            with self._lock:
                self._cache[sae, index] = cached
        return cached


def _vectors(encoder: SparseEncoder, decoder: FloatArray) -> FeatureVectors:
    """Return one feature with all constants of its encoder folded into a bias and a threshold."""
    decoder = np.ascontiguousarray(decoder, dtype=np.float32)
    if encoder.activation == "topk":
        return FeatureVectors(decoder, np.empty(0, dtype=np.float32), problem=_NEEDS_ALL)
    weights = encoder.weights[:, 0].astype(np.float64)
    shift = 0.0 if encoder.subtracted is None else -float(encoder.subtracted.astype(np.float64) @ weights)
    bias, threshold = float(encoder.bias[0]), 0.0
    if encoder.scale is not None and encoder.magnitude_bias is not None:
        scale, magnitude = float(encoder.scale[0]), float(encoder.magnitude_bias[0])
        # The gate is open if x.w + shift + bias > 0, that is, scale (x.w + shift) + magnitude > threshold.
        weights, shift, bias, threshold = weights * scale, shift * scale, magnitude, magnitude - scale * bias
    elif encoder.threshold is not None:
        threshold = float(encoder.threshold[0])
    return FeatureVectors(decoder, weights.astype(np.float32), shift + bias, max(threshold, 0.0))

# SPDX-License-Identifier: Apache-2.0
"""Readouts and traces of a request: attributes of outputs, and results of the HTTP client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.step_rows import IntArray

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Readouts:
    """Values of one readout of one request, by position."""

    positions: IntArray
    """``[n]`` int64, ascending: positions in the prompt and the generated tokens together, from 0.

    The last token has a value only if a stop on it ended the request; otherwise it is not forwarded.
    """
    values: FloatArray
    """float32 ``[n]`` for a probe, ``[n, k]`` for projections and ``sae``, ``[n, layers, k]`` for ``lens``.

    Over HTTP, NaN stands for all numbers that are not finite."""
    indices: npt.NDArray[np.int32] | None = None
    """int32 in the shape of ``values``, largest value first: features of ``sae`` (-1 if fewer than k are active), or
    tokens of ``lens``; None for other readouts."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32] | None:
        """Token ids of ``lens``; equal to `indices`."""
        return self.indices

    @property
    def logprobs(self) -> FloatArray:
        """Log-probabilities of ``lens``; equal to `values`."""
        return self.values


@dataclass(frozen=True, eq=False)
class SteeringTrace:
    """Factors of the gated and live edits of one request at its generated tokens."""

    positions: IntArray
    """``[n]`` int64, ascending."""
    gates: FloatArray
    """float32 ``[n, gated edits]``: the factor in force, in the order of the request's edits that have ``when`` or
    whose ``tokens`` are a part of the output.

    0 at tokens that the edit does not cover."""
    live: Mapping[str, FloatArray]
    """float32 ``[n]`` by name: the live strength in force."""
    num_covered: int = 0
    """Number of tokens that the gated edits cover, summed over the edits."""
    controller_error: str | None = None
    """Error of the sample's controller, after which the live strengths have not changed, or None."""
    error: str | None = None
    """Reason for a missing trace of an HTTP response; the other attributes are then empty."""


def merge_readouts(
    first: Mapping[str, Readouts] | None, second: Mapping[str, Readouts] | None
) -> Mapping[str, Readouts] | None:
    """Concatenate two consecutive deltas; either may be missing."""
    if not first or not second:
        return first or second
    return {
        name: Readouts(
            np.concatenate((first[name].positions, each.positions)),
            np.concatenate((first[name].values, each.values)),
            _joined(first[name].indices, each.indices),
        )
        for name, each in second.items()
    }


def _joined(first: npt.NDArray[np.int32] | None, second: npt.NDArray[np.int32] | None) -> npt.NDArray[np.int32] | None:
    return None if first is None or second is None else np.concatenate((first, second))

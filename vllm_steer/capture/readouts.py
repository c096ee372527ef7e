# SPDX-License-Identifier: Apache-2.0
"""Readouts and traces of a request: attributes of outputs, and results of the HTTP client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    Over HTTP, infinite numbers become NaN."""
    indices: npt.NDArray[np.int32] | None = None
    """int32 in the shape of ``values``, largest value first: features of ``sae`` (-1 if fewer than k are active), or
    tokens of ``lens``; None for other readouts."""

    def to_json(self, fields: tuple[str, ...]) -> dict[str, Any]:
        """Return the values as JSON types; ``fields`` are the names of their arrays (`ReadoutKind.columns`)."""
        arrays = [each.tolist() for each in (self.indices, self.values) if each is not None]
        return {"positions": self.positions.tolist(), **dict(zip(fields, arrays, strict=True))}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Readouts:
        """Return the values that `to_json` has written."""
        indices = document.get("indices", document.get("token_ids"))
        return cls(
            np.array(document["positions"], np.int64),
            np.array(document.get("values", document.get("logprobs")), np.float32),
            None if indices is None else np.array(indices, np.int32),
        )

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

    def to_json(self) -> dict[str, Any]:
        """Return the factors as JSON types."""
        if self.error is not None:
            return {"error": self.error}
        return {
            "positions": self.positions.tolist(),
            "gates": self.gates.tolist(),
            "live": {name: strengths.tolist() for name, strengths in self.live.items()},
            **({} if self.controller_error is None else {"controller_error": self.controller_error}),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SteeringTrace:
        """Return the factors that `to_json` has written."""
        if "error" in document:
            return cls(np.empty(0, np.int64), np.empty((0, 0), np.float32), {}, error=document["error"])
        positions = np.array(document["positions"], np.int64)
        gates = np.array(document["gates"], np.float32).reshape(len(positions), -1 if len(positions) else 0)
        live = {name: np.array(strengths, np.float32) for name, strengths in document["live"].items()}
        return cls(positions, gates, live, controller_error=document.get("controller_error"))


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

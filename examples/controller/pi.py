# SPDX-License-Identifier: Apache-2.0
"""A controller that holds a probe at a target: the strength is proportional to the error and to its integral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_steer import ControlledRequest, Controller


class PI(Controller):
    """Proportional-integral controller of one live strength.

    Requests without this readout and this live strength are left as they are.

    Args:
        readout: Name of the probe in the request's ``readouts``.
        live: Name of the live strength.
        target: Value at which the probe is held.
        gain: Strength for each unit of the mean error of the new tokens.
        integral: Strength for each unit of the error of every token so far.
        limit: Largest strength, in both directions.
    """

    name: ClassVar[str] = "pi"

    def __init__(
        self,
        *,
        readout: str,
        live: str,
        target: float,
        gain: float = 0.1,
        integral: float = 0.05,
        limit: float = 8.0,
    ) -> None:
        self._readout, self._live, self._target = readout, live, target
        self._gain, self._integral, self._limit = gain, integral, limit
        self._sum = 0.0

    def on_readouts(
        self, request: ControlledRequest, positions: Mapping[str, Any], values: Mapping[str, Any]
    ) -> dict[str, float] | None:
        """Return the new strength."""
        new = values.get(self._readout)
        if new is None or not len(new) or self._live not in request.live_names:
            return None
        errors = self._target - new
        bound = self._limit / self._integral
        # The bound keeps the integral from growing while the strength is at its limit.
        self._sum = min(max(self._sum + float(errors.sum()), -bound), bound)
        strength = self._gain * float(errors.mean()) + self._integral * self._sum
        return {self._live: min(max(strength, -self._limit), self._limit)}

# SPDX-License-Identifier: Apache-2.0
"""Description of a step's batch, the same for both of vLLM's model runners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_steer.taps.assignment import BatchLayout


@dataclass(frozen=True)
class StepBatch:
    """Batch of one step as the host knows it; arrays have one item per request, in batch order.

    Attributes:
        layout: Returns the slots and positions on the device. Called only if they are needed.
        ids: Request ids.
        request_slot: Row of each request in the segment tables.
        first: First position of each request in this step. With speculative decoding it may be ahead of the device's,
            since the host does not know yet which draft tokens were accepted.
        count: Number of tokens of each request in this step.
        num_padded: Number of tokens that the model runs on, including padding.
    """

    layout: Callable[[], BatchLayout]
    ids: Sequence[str]
    request_slot: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    num_padded: int

    def ids_of(self, requests: npt.NDArray[np.int64]) -> tuple[str, ...]:
        """Return the ids of the requests with these indices, in ascending order."""
        if len(requests) == len(self.ids):
            return tuple(self.ids)
        return tuple(map(self.ids.__getitem__, requests.tolist()))

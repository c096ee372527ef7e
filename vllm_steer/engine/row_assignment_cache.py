# SPDX-License-Identifier: Apache-2.0
"""Reuse of the token-to-row assignment on the device while it does not change.

When every request of a decoding batch has reached its last segment, the batch takes the same rows in every step. The
assignment then depends only on the programs in the tables, the place of each request in the batch, and the number of
its tokens.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt


class RowAssignmentCache:
    """Key of the last row assignment; an equal key means that the device tables are still valid."""

    def __init__(self) -> None:
        self._key: Hashable = None

    def is_valid(
        self,
        version: int,
        num_padded: int,
        request_slot: npt.NDArray[np.int64],
        count: npt.NDArray[np.int64],
        *,
        in_last_segments: bool,
    ) -> bool:
        """Return whether the last assignment is valid for this step. If not, the caller assigns rows for this step.

        Args:
            version: Version of the program store, which changes with every request with a program that starts or ends.
            num_padded: Number of tokens that the model runs on.
            request_slot: Slots of the requests, in batch order.
            count: Number of tokens of each request.
            in_last_segments: Whether all tokens are in the last segments of their requests.
        """
        key = (version, num_padded, request_slot.tobytes(), count.tobytes()) if in_last_segments else None
        valid = key is not None and key == self._key
        self._key = key
        return valid

    def invalidate(self) -> None:
        """Drop the assignment after the rows on the device have been cleared."""
        self._key = None

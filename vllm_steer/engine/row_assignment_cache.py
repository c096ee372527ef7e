# SPDX-License-Identifier: Apache-2.0
"""Whether the rows on the device are still those of the step that comes: then nothing is launched for them.

A decoding batch takes the same rows step after step, once every request has come to its last segment. Which rows those
are depends on nothing but what is compared here: the programs in the tables, who has which place in the batch, and how
many tokens each has.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt


class RowAssignmentCache:
    """What the rows on the device were assigned for."""

    def __init__(self) -> None:
        self._of: Hashable = None

    def serve(
        self,
        changes: int,
        num_padded: int,
        slot: npt.NDArray[np.int64],
        count: npt.NDArray[np.int64],
        *,
        settled: bool,
    ) -> bool:
        """Whether they serve this step too; if not, they are about to be assigned for it.

        ``changes`` differs whenever a steered request has come or gone. ``settled``: all tokens of the step lie in the
        last segments of their requests.
        """
        of = (changes, num_padded, slot.tobytes(), count.tobytes()) if settled else None
        serves = of is not None and of == self._of
        self._of = of
        return serves

    def forget(self) -> None:
        """They have been cleared."""
        self._of = None

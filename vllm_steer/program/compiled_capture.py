# SPDX-License-Identifier: Apache-2.0
"""Compiled captures of a program."""

from __future__ import annotations

import msgspec

from vllm_steer.request import Selector
from vllm_steer.request.selector import Wire

NO_PROJECTION = -1
"""``projection`` of a capture whose rows are sent unprojected."""


class CompiledCapture(msgspec.Struct, frozen=True, array_like=True):
    """One capture: the stream at a point of some layers, on some tokens, before or after the edits of that point.

    ``projection`` is an index into the program's projections, or :data:`NO_PROJECTION`. Consumer, dtype and reduction
    are handled by the front end and are not part of the program.
    """

    point: int
    layers: tuple[int, ...]
    before: bool
    tokens: Wire
    projection: int = NO_PROJECTION

    @property
    def selector(self) -> Selector:
        """The captured tokens."""
        return Selector.from_wire(self.tokens)

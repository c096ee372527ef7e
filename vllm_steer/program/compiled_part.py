# SPDX-License-Identifier: Apache-2.0
"""Compiled parts of a conversation, and what the front end fills in for a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.request.message_parts import Marker
from vllm_steer.request.selector import Selector

NO_TOKEN = -1
"""End of a span that lasts until the message ends."""
MAX_BREAKS = 2


class Markers(NamedTuple):
    """Tokens that decide about a span."""

    start: int
    end: int
    breaks: tuple[int, ...] = ()
    """Tokens that end the span without belonging to it, at most :data:`MAX_BREAKS`: the end of the message and, for the
    thinking, the start of a tool call."""


class CompiledPart(msgspec.Struct, frozen=True, array_like=True):
    """A span of generated tokens from ``start`` to ``end``, both included, or what lies outside of it.

    ``start`` and ``end`` are empty for a named span, and may be text, until the front end fills in the token ids.
    """

    name: str
    start: Marker
    end: Marker
    outside: bool
    opened: bool
    """Whether the span has begun: at first if the prompt has neither token, once bound at the end of the prompt."""
    optional: bool = False
    """Whether the part is left out on engines that do not know the tokens of its span."""
    bound: bool = False
    """Whether the ids are filled in and the prompt has been read."""
    breaks: tuple[int, ...] = ()
    """Tokens that end the span without belonging to it, filled in with the ids."""

    def covers(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of ``tokens``, the generated ones from the first on, belong to the part, which is bound."""
        breaks = np.isin(tokens, self.breaks)
        places = np.flatnonzero((tokens == self.start) | (tokens == self.end) | breaks)
        opened = np.concatenate([[self.opened], tokens[places] == self.start])
        number = np.searchsorted(places, np.arange(len(tokens)), "right")
        # A token belongs to the span that is open before or after it, except that a break does not belong to it.
        before = np.concatenate([[self.opened], opened[number][:-1]])[: len(tokens)]
        inside = opened[number] | (before & ~breaks)
        return np.asarray(inside != self.outside)

    def after(self, message: Sequence[int]) -> bool:
        """Return whether the span is open at the end of a message, which has -1 at positions without a token."""
        for token in reversed(message):
            if token != NO_TOKEN and token in (self.start, self.end, *self.breaks):
                return token == self.start
        return self.opened


def compile_parts(selector: Selector | None) -> tuple[CompiledPart, ...]:
    """Return the parts to which a selector is restricted, in a fixed order."""
    spans = () if selector is None else selector.spans
    return tuple(
        CompiledPart(each.name, each.start, each.end, each.outside, each.opened, each.optional) for each in spans
    )


def selector_of(parts: tuple[CompiledPart, ...]) -> Selector:
    """Return the selector from which parts have been compiled, with the ids of its markers unless it has a name."""
    first = parts[0]
    if len(parts) > 1:
        return Selector("answer")
    if first.name and not first.outside:
        return Selector.parse(first.name)
    return Selector({"outside" if first.outside else "between": first.name or [first.start, first.end]})


def bound_parts(
    parts: tuple[CompiledPart, ...],
    find: Callable[[CompiledPart], Markers | None],
    message: Sequence[int],
) -> tuple[CompiledPart, ...]:
    """Return parts with their token ids, in the state at the end of a prompt.

    Args:
        parts: Parts of one selection.
        find: Returns the markers of a part, or None to leave it out.
        message: The tokens of the message that the prompt leaves open.
    """
    filled = []
    for part in parts:
        found = find(part)
        if found is not None:
            part = msgspec.structs.replace(part, start=found.start, end=found.end, breaks=found.breaks)
            filled.append(msgspec.structs.replace(part, opened=part.after(message), optional=False, bound=True))
    return tuple(filled)

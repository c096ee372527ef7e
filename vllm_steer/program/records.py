# SPDX-License-Identifier: Apache-2.0
"""Compiled conditions and stops of a program, and the records of the tokens of a request.

A record is a row of float32 numbers that every token of a request with readouts, gates, stops or live strengths has on
the device. Column 0 holds the number of the stop that ends generation with this token, 0 for none. Then follow the
values of the readouts, the factor of each edit with conditions or a live name, in the order of the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan

import msgspec

from vllm_steer.program.compiled_part import MAX_BREAKS, NO_TOKEN, CompiledPart
from vllm_steer.request import Selector
from vllm_steer.request.selector import Wire

TOKEN, PREVIOUS, LATCH, PROMPT_MEAN, PROMPT_MAX, PROMPT_LAST, MEAN, MAX, EMA, HELD, PART, STOP = range(1, 13)
"""Kinds of conditions on the device; 0 is none. :data:`PART` looks at the token itself instead of a readout."""
CONDITION_FIELDS, BOUND_FIELDS = 11, 6
"""Integers and numbers of a condition on the device."""
WINDOW_CODES: dict[str, int] = {"token": TOKEN, "previous": PREVIOUS, "latch": LATCH}
OVER_CODES: dict[str, int] = {"mean": PROMPT_MEAN, "max": PROMPT_MAX, "last": PROMPT_LAST}
PREVIOUS_CODES: dict[str, int] = {"mean": MEAN, "max": MAX, "last": PREVIOUS, "ema": EMA}
OF_PROMPT = frozenset(OVER_CODES.values())
STOP_COLUMN = 0

_STOP_REASON = "readout {} is {:.6g} at position {}"
STOP_REASON_PREFIX = _STOP_REASON.partition("{")[0]


class CompiledBound(msgspec.Struct, frozen=True, array_like=True):
    """A bound on a readout."""

    above: bool
    threshold: float


class CompiledCondition(msgspec.Struct, frozen=True, array_like=True):
    """A condition on the readout with the index ``readout``; ``kind`` combines window and fold."""

    readout: int
    kind: int
    bound: CompiledBound
    sharpness: float
    release: CompiledBound | None
    tokens: Wire | None
    alpha: float = 0.0
    count: int = 0
    """Tokens in a row of :data:`HELD`."""
    parts: tuple[CompiledPart, ...] = ()
    """Parts of the output to whose tokens the condition looks; empty for all."""

    @property
    def selector(self) -> Selector | None:
        """The prompt tokens that a condition on the prompt covers; None for all."""
        return None if self.tokens is None else Selector.from_wire(self.tokens)


class CompiledStop(msgspec.Struct, frozen=True, array_like=True):
    """A condition that ends generation when it has held at ``tokens`` generated tokens in a row."""

    readout: int
    bound: CompiledBound
    tokens: int
    parts: tuple[CompiledPart, ...] = ()
    """Parts of the output to whose tokens the condition looks; empty for all."""


@dataclass(frozen=True)
class RecordLayout:
    """Columns of a program's records."""

    readouts: tuple[int, ...]
    """First column of each readout."""
    gates: dict[int, int]
    """Column of the factor of each edit with conditions or in a part, by edit index. Equal edits share a column."""
    live: dict[str, int]
    """Column of each live strength."""
    parts: dict[tuple[CompiledPart, ...], int]
    """Column of each selection of parts by edits without conditions, readouts, conditions and stops: 1 for its tokens,
    0 for others."""
    width: int
    """Number of columns."""


@dataclass(frozen=True)
class DeviceCondition:
    """A condition resolved for a prompt length, in the form of the device tables.

    The state of a :data:`PART` is 1 after its start token, and 0 after its end token and after ``breaks``. ``score``
    and ``count`` are the first two, and ``number`` is 1 for tokens outside.
    """

    kind: int
    score: int
    """Column of the readout."""
    target: int
    """Column that the factor multiplies; :data:`STOP_COLUMN` for a stop."""
    first: int
    """First position that is folded into the state."""
    stop: int
    """Position after the last one."""
    count: int
    """Number of folded positions of a mean of the prompt; tokens in a row of :data:`HELD` and of a stop."""
    start: int
    """First position that the factor applies to."""
    number: int
    """Number of the stop, from 1."""
    threshold: float
    sign: float
    sharpness: float
    release: float
    release_sign: float
    """0 without a release bound."""
    alpha: float = 0.0
    """Weight of the newest value of :data:`EMA`."""
    mask: int = 0
    """Column that is not 0 for the tokens that are folded; 0 for all."""
    opened: bool = False
    """Whether a :data:`PART` has begun in the prompt."""
    breaks: tuple[int, ...] = (NO_TOKEN,) * MAX_BREAKS
    """Tokens that end a :data:`PART` without belonging to it."""

    @property
    def initial_state(self) -> float:
        """The state before the first folded token. A condition without any folded token does not hold."""
        if self.kind == PART:
            return float(self.opened)
        if self.kind == EMA or (self.kind == PREVIOUS and self.mask):
            return nan
        return -inf if self.kind in (PROMPT_MAX, MAX) else 0.0

    @property
    def fields(self) -> tuple[int, ...]:
        """The integers of the condition on the device, :data:`CONDITION_FIELDS` of them."""
        return (
            self.kind, self.score, self.target, self.first, self.stop, self.count, self.start, self.number, self.mask,
            *self.breaks,
        )  # fmt: skip

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers of the condition on the device, :data:`BOUND_FIELDS` of them."""
        return self.threshold, self.sign, self.sharpness, self.release, self.release_sign, self.alpha


@dataclass(frozen=True)
class RequestRecords:
    """The records of a request: readouts, gates, stops and live strengths of its program, for a prompt length."""

    layout: RecordLayout
    conditions: tuple[DeviceCondition, ...]
    """All but those of the window ``token``, which are instructions."""
    first_needed: int | None
    """First position that has to be computed and not taken from the prefix cache; None if there is none."""
    record_start: int
    """First position whose record leaves the device."""
    record_stop: int
    has_state: bool
    """Whether the request needs factors at the start of a step or its state folded after it, and so decisions are kept
    for a preemption."""

    @property
    def feeds_back(self) -> bool:
        """Whether the readout of a generated token decides about edits of later ones."""
        return any(each.kind not in OF_PROMPT and each.kind != STOP for each in self.conditions)


def stop_reason(name: str, position: int, value: float) -> str:
    """Return the ``stop_reason`` of a request that a readout has stopped."""
    return _STOP_REASON.format(name, value, position)

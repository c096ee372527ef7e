# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a request an edit or a read covers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_SELECTOR_ITEMS
from vllm_steer.spec.scalars import is_integer, read_choice, shown

Interval: TypeAlias = tuple[int, int]
SelectorName = Literal["all", "prompt", "generated", "last_prompt"]
TokensInput: TypeAlias = "SelectorName | Sequence[int | Sequence[int | None]] | range | Selector"

OPEN_END = 2**31 - 1
"""The stop of an interval without an end. Positions are below it: the device keeps them as int32."""


# Name -> the interval it covers, given the number of prompt tokens.
NAMED: Mapping[SelectorName, Callable[[int], Interval]] = MappingProxyType(
    {
        "all": lambda prompt_len: (0, OPEN_END),
        "prompt": lambda prompt_len: (0, prompt_len),
        "generated": lambda prompt_len: (prompt_len, OPEN_END),
        "last_prompt": lambda prompt_len: (prompt_len - 1, prompt_len),
    }
)


@dataclass(frozen=True, init=False, repr=False)
class Selector:
    """A set of token positions of one request; frozen and hashable.

    Written as a name (``"all"``, ``"prompt"``, ``"generated"``, ``"last_prompt"``), a ``range``, or a list
    of positions and ``[start, stop)`` pairs. Positions count from 0 over prompt and generated tokens
    alike; negative ones count back from the end of the prompt (-1 is the last prompt token). A pair's stop
    may be None: no end. Selectors that list the same positions in the same terms are equal.
    """

    # A name, or spans. In a span a start below 0 and a stop of 0 or below count from the prompt's end (so
    # a stop of 0 is that end, which a written pair cannot say), and END is no end.
    _where: SelectorName | tuple[Interval, ...]

    def __init__(self, tokens: TokensInput = "all", field: str = "tokens") -> None:
        """Read ``tokens``; raises SteeringError, naming ``field``, for what the class does not describe."""
        object.__setattr__(self, "_where", _read(tokens, field))

    @classmethod
    def parse(cls, value: Any, field: str = "tokens") -> "Selector":
        """``value`` as a selector: itself, or what the constructor makes of it."""
        return value if isinstance(value, Selector) else cls(value, field)

    def intervals(self, prompt_len: int, field: str = "tokens") -> tuple[Interval, ...]:
        """The positions covered in a request of ``prompt_len`` prompt tokens.

        Returns:
            Half-open intervals: sorted, disjoint, not touching, not empty. The stop of an open one is END.

        Raises:
            SteeringError: the prompt is too short for a position counted from its end, or leaves a pair
                empty.
        """
        if prompt_len < 1:
            raise SteeringError(field, f"needs a prompt of at least one token, not {prompt_len}")
        if isinstance(self._where, str):
            return (NAMED[self._where](prompt_len),)
        return tuple(_merged(_resolved(span, prompt_len, field) for span in self._where))

    @property
    def max_position(self) -> int:
        """The largest absolute position that is named; -1 if none is."""
        if isinstance(self._where, str):
            return -1
        return max(max(start, stop - 1 if stop < OPEN_END else -1, -1) for start, stop in self._where)

    def to_wire(self) -> str | list[int | list[int | None]]:
        """The selector in builtins that JSON and msgpack can carry; `from_wire` is the inverse."""
        if isinstance(self._where, str):
            return self._where
        return [item for span in self._where for item in _written(span)]

    @classmethod
    def from_wire(cls, obj: object) -> "Selector":
        """Inverse of `to_wire`; checks like `parse`."""
        return _named(obj) if isinstance(obj, str) else cls.parse(obj)

    def __repr__(self) -> str:
        return f"Selector({self.to_wire()!r})"


# One for each step of a program, and nearly always one of a few names.
@lru_cache(maxsize=8)
def _named(name: str) -> "Selector":
    return Selector.parse(name)


def _read(tokens: object, field: str) -> SelectorName | tuple[Interval, ...]:
    if isinstance(tokens, Selector):
        return tokens._where
    if isinstance(tokens, str):
        return read_choice(tokens, NAMED, field)
    if isinstance(tokens, range):
        return _canonical(_range_spans(tokens, field))
    if isinstance(tokens, tuple):
        raise SteeringError(
            field, "a tuple could be positions or a range: write [3, 7] for two tokens, [(3, 7)] for 3 to 6"
        )
    if not isinstance(tokens, list):
        raise SteeringError(
            field,
            f"must be {', '.join(NAMED)}, a range, or a list of positions and [start, stop] pairs, "
            f"not {shown(tokens)} ({type(tokens).__name__})",
        )
    if not 1 <= len(tokens) <= MAX_SELECTOR_ITEMS:
        raise SteeringError(
            field, f"has {len(tokens)} items; list 1 to {MAX_SELECTOR_ITEMS} positions and [start, stop] pairs"
        )
    return _canonical(_item_span(item, f"{field}[{i}]") for i, item in enumerate(tokens))


def _item_span(item: object, field: str) -> Interval:
    if is_integer(item):
        position = _position(item, field)
        return position, position + 1
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        raise SteeringError(field, f"must be a position or a [start, stop] pair, not {shown(item)}")
    start = _position(item[0], f"{field}[0]")
    if item[1] is None:
        return start, OPEN_END
    stop = _position(item[1], f"{field}[1]")
    if stop == 0:
        raise SteeringError(field, f"[{start}, 0) is empty; for the last 3 tokens of the prompt write [-3, -2, -1]")
    # Bounds of unlike sign can be compared only when the prompt is known.
    if (start < 0) == (stop < 0) and start >= stop:
        raise SteeringError(field, f"[{start}, {stop}) is empty; a pair's start is before its stop")
    return start, stop


def _position(value: object, field: str) -> int:
    if not is_integer(value):
        raise SteeringError(field, f"must be an integer, not {shown(value)} ({type(value).__name__})")
    if not -OPEN_END < value < OPEN_END:
        raise SteeringError(field, f"must be within {-OPEN_END + 1} to {OPEN_END - 1}, not {shown(value)}")
    return int(value)


def _range_spans(positions: range, field: str) -> Iterable[Interval]:
    if not positions:
        raise SteeringError(field, f"{positions} names no token")
    low, high = sorted((_position(positions[0], field), _position(positions[-1], field)))
    if abs(positions.step) != 1:
        if len(positions) > MAX_SELECTOR_ITEMS:
            raise SteeringError(
                field, f"{positions} has {len(positions)} positions; with a step, at most {MAX_SELECTOR_ITEMS}"
            )
        return [(position, position + 1) for position in positions]
    if low < 0 <= high:
        return [(low, 0), (0, high + 1)]
    return [(low, high + 1)]


def _canonical(spans: Iterable[Interval]) -> tuple[Interval, ...]:
    """Sort, and merge what needs no prompt length to be merged.

    Open spans are left alone, since one could swallow a position that `max_position` has to report.
    """
    absolute, relative, others = [], [], set()
    for start, stop in spans:
        if start >= 0 and 0 < stop < OPEN_END:
            absolute.append((start, stop))
        elif start < 0 and stop <= 0:
            relative.append((start, stop))
        else:
            others.add((start, stop))
    return tuple(sorted({*_merged(absolute), *_merged(relative), *others}))


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _resolved(span: Interval, prompt_len: int, field: str) -> Interval:
    start = span[0] if span[0] >= 0 else span[0] + prompt_len
    stop = span[1] if span[1] > 0 else span[1] + prompt_len
    if start < 0 or stop < 0:
        raise SteeringError(
            field, f"{shown(_written(span))} reaches before the start of a prompt of {prompt_len} tokens"
        )
    if start >= stop:
        raise SteeringError(field, f"{shown(_written(span))} is empty for a prompt of {prompt_len} tokens")
    return start, stop


def _written(span: Interval) -> list[int | list[int | None]]:
    start, stop = span
    if stop == start + 1:
        return [start]
    if stop == 0:
        return [[start, -1], -1]
    return [[start, None if stop == OPEN_END else stop]]

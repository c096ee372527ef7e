# SPDX-License-Identifier: Apache-2.0
"""Token selectors: the positions of a request that an edit or a capture covers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_SELECTOR_ITEMS
from vllm_steer.request.field_types import read
from vllm_steer.request.message_parts import PARTS, PROMPT_PARTS, PartName, PromptPartName, Span, SpanForm, read_span
from vllm_steer.request.scalars import MASK_HINT, did_you_mean, is_integer, read_choice, refuse_repeated, shown

Interval: TypeAlias = tuple[int, int]
SelectorName = Literal["all", "prompt", "generated", "last_prompt"]
PositionsName = Literal["last_prompt", "all_prompt", "all_generated", "all"]
TokensName = SelectorName | PartName | PromptPartName
TokensInput: TypeAlias = "TokensName | Mapping[str, Any] | Sequence[int | Sequence[int | None]] | range | Selector"
Wire = str | list[int | list[int | None]] | dict[str, Any]

PositionListForm = Annotated[
    list[int | list[int | None]],
    msgspec.Meta(
        min_length=1,
        max_length=MAX_SELECTOR_ITEMS,
        description="Positions and `[start, stop]` pairs. Positions count from 0 over prompt and generated tokens; "
        "negative ones count back from the end of the prompt. A stop of null means no end.",
    ),
]
"""JSON form of a list of positions."""
TokensForm = TokensName | PositionListForm | SpanForm
"""JSON form of the tokens of an edit."""

_MAPPING_KEYS = "generated, between or outside"
_ARRAY_HINT = f"convert positions with .tolist(); {MASK_HINT}"
OPEN_END = 2**31 - 1
"""Stop of an interval without end; all positions are smaller, because the device stores them as int32."""

NAMED: Mapping[SelectorName, Callable[[int], Interval]] = MappingProxyType(
    {
        "all": lambda prompt_len: (0, OPEN_END),
        "prompt": lambda prompt_len: (0, prompt_len),
        "generated": lambda prompt_len: (prompt_len, OPEN_END),
        "last_prompt": lambda prompt_len: (prompt_len - 1, prompt_len),
    }
)
"""Named selectors: functions from the number of prompt tokens to the interval covered."""

POSITIONS: Mapping[PositionsName, SelectorName] = MappingProxyType(
    {"last_prompt": "last_prompt", "all_prompt": "prompt", "all_generated": "generated", "all": "all"}
)
"""Selectors by the position names of capture specs."""

_UNBOUND: Mapping[str, SelectorName] = MappingProxyType(
    {name: "all" if name == "assistant" else "prompt" for name in PROMPT_PARTS}
)
"""Tokens among which the parts of a prompt are."""

TOKEN_NAMES: tuple[TokensName, ...] = (*NAMED, *PARTS, *PROMPT_PARTS)
"""Named selectors and parts, the names of the tokens of an edit."""

_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("last", "last_token", "final"), "last_prompt")
    | dict.fromkeys(("prefill", "input"), "prompt")
    | dict.fromkeys(("decode", "generation", "output", "completion", "response"), "generated")
    | dict.fromkeys(("every", "*"), "all")
)
TOKEN_ALIASES: Mapping[str, str] = MappingProxyType(dict(_ELSEWHERE) | {**POSITIONS})
"""Selectors by names that other interfaces use, for error messages."""
POSITION_ALIASES: Mapping[str, PositionsName] = MappingProxyType(
    {
        other: name
        for name, selector in POSITIONS.items()
        for other in (selector, *_ELSEWHERE)
        if _ELSEWHERE.get(other, other) == selector
    }
)
"""Position names by names that other interfaces use, for error messages."""


class _Generated(NamedTuple):
    """Intervals that count from the first generated token."""

    intervals: tuple[Interval, ...]


_Where: TypeAlias = "SelectorName | PartName | PromptPartName | tuple[Interval, ...] | _Generated | Span"


class Selector:
    """A set of token positions of one request; immutable and hashable.

    A selector is written as a name (``"all"``, ``"prompt"``, ``"generated"``, ``"last_prompt"``), a ``range``, or a
    list of positions and ``[start, stop)`` pairs. Positions count from 0 over prompt and generated tokens. Negative
    positions count back from the end of the prompt (-1 is the last prompt token). A stop of None means no end.
    ``{"generated": [[8, None]]}`` counts from the first generated token. Selectors that list the same positions in the
    same terms are equal.

    Edits, readouts and conditions also take parts of the output that its tokens decide: ``"thinking"``, ``"answer"``,
    ``"tool_call"``, or ``{"between": [start, end]}`` and ``{"outside": [start, end]}`` with two tokens; ``"image"``,
    the placeholder tokens of images in the prompt; and ``"system"``, ``"user"`` and ``"assistant"``, messages of the
    chat template.

    Examples:
        >>> from vllm_steer import Selector
        >>> Selector([0, [2, 4], -1]).intervals(prompt_len=10)
        ((0, 1), (2, 4), (9, 10))
    """

    # A name, or intervals. In an interval, a start below 0 and a stop of 0 or below count from the prompt's end. A stop
    # of 0 is that end itself, which a pair in a request cannot express. OPEN_END means no end.
    _where: _Where
    __slots__ = ("_where",)

    def __init__(self, tokens: TokensInput = "all", field: str = "tokens") -> None:
        """Parse ``tokens``; raise SteeringError naming ``field`` if it has none of the forms above."""
        object.__setattr__(self, "_where", _read(tokens, field))

    @classmethod
    def parse(cls, value: Any, field: str = "tokens") -> "Selector":
        """Return ``value`` if it is a selector; otherwise parse it."""
        return value if isinstance(value, Selector) else cls(value, field)

    def intervals(self, prompt_len: int, field: str = "tokens") -> tuple[Interval, ...]:
        """Return the positions covered in a request of ``prompt_len`` prompt tokens.

        Returns:
            Half-open intervals: sorted, disjoint, not adjacent, not empty. The stop of an open one is `OPEN_END`.

        Raises:
            SteeringError: A position before the start of the prompt is selected, or a pair is empty for this prompt.
        """
        if prompt_len < 1:
            raise SteeringError(field, f"needs a prompt of at least one token, not {prompt_len}")
        if isinstance(self._where, _Generated):
            return tuple(
                (start + prompt_len, min(stop + prompt_len, OPEN_END)) for start, stop in self._where.intervals
            )
        if self.is_named:
            # Images and messages can be anywhere until their positions are filled in.
            name: Any = "generated" if self.spans else self._where
            return (NAMED[_UNBOUND.get(name, name)](prompt_len),)
        return merge_intervals(_resolved(interval, prompt_len, field) for interval in self.listed)

    def beyond(self, prompt_len: int, stop: int) -> tuple[int | list[int | None], ...]:
        """Return the selected positions and ``[start, stop]`` pairs from position ``stop`` on.

        A selection without end covers as many tokens as there are. It counts only if it starts there.

        Args:
            prompt_len: Number of prompt tokens.
            stop: First position that is out of reach.

        Raises:
            SteeringError: See `intervals`.
        """
        return tuple(
            item
            for start, end in self.intervals(prompt_len)
            if end > stop and (end < OPEN_END or start >= stop)
            for item in _written((max(start, stop), end))
        )

    @property
    def is_named(self) -> bool:
        """Whether the selector is a name, which is relative to the prompt."""
        return isinstance(self._where, (str, Span))

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of the output to which the selection is restricted, each inside or outside."""
        if isinstance(self._where, Span):
            return (self._where,)
        return PARTS.get(self._where, ()) if isinstance(self._where, str) else ()  # type: ignore[arg-type]

    @property
    def is_prompt_part(self) -> bool:
        """Whether messages or images are selected, whose positions the front end fills in."""
        return self._where in PROMPT_PARTS

    @property
    def is_absolute(self) -> bool:
        """Whether the same positions are selected for every length of the prompt."""
        if self.is_named or isinstance(self._where, _Generated):
            return self._where == "all"
        return all(start >= 0 and stop > 0 for start, stop in self.listed)

    @property
    def is_open(self) -> bool:
        """Whether the selection has no end, so that it covers as many tokens as are generated."""
        if self.is_named:
            return self._where in ("all", "generated", "assistant") or bool(self.spans)
        return any(stop == OPEN_END for _, stop in self.listed)

    @property
    def listed(self) -> tuple[Interval, ...]:
        """The intervals of a selector that is not named, in the terms in which they are written."""
        if isinstance(self._where, _Generated):
            return self._where.intervals
        return () if isinstance(self._where, (str, Span)) else self._where

    @property
    def num_positions(self) -> int | None:
        """Number of positions selected if it is the same for every prompt, otherwise None."""
        if self.is_named:
            return 1 if self._where == "last_prompt" else None
        absolute = [start >= 0 and 0 < stop < OPEN_END for start, stop in self.listed]
        relative = [start < 0 and stop <= 0 for start, stop in self.listed]
        # Absolute and relative positions of one selector overlap for some prompts.
        return sum(stop - start for start, stop in self.listed) if all(absolute) or all(relative) else None

    def keeps_order(self, prompt_len: int) -> bool:
        """Return whether all positions counted from the start of the prompt come before those counted from its end."""
        if self.is_named or isinstance(self._where, _Generated):
            return True
        resolved = [(start < 0, *_resolved((start, stop), prompt_len, "tokens")) for start, stop in self.listed]
        last = max((stop for relative, _, stop in resolved if not relative), default=0)
        return all(start >= last for relative, start, _ in resolved if relative)

    @property
    def max_position(self) -> int:
        """The largest absolute position that is named; -1 if there is none."""
        if self.is_named:
            return -1
        return max(max(start, stop - 1 if stop < OPEN_END else -1, -1) for start, stop in self.listed)

    def to_wire(self) -> Wire:
        """Return the selector as builtins for JSON and msgpack; `from_wire` is the inverse."""
        if isinstance(self._where, str):
            return self._where
        if isinstance(self._where, Span):
            return self._where.to_wire()
        items = [item for interval in self.listed for item in _written(interval)]
        return {"generated": items} if isinstance(self._where, _Generated) else items

    @classmethod
    def from_wire(cls, obj: object) -> "Selector":
        """Parse the result of `to_wire`, with the checks of `parse`."""
        return _named(obj) if isinstance(obj, str) else cls.parse(obj)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot set {name}: selectors are immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return Selector, (self.to_wire(),)

    def __eq__(self, other: object) -> bool:
        return self._where == other._where if isinstance(other, Selector) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._where)

    def __repr__(self) -> str:
        return f"Selector({self.to_wire()!r})"


# Called for each edit of a program; nearly all have one of a few names.
@lru_cache(maxsize=8)
def _named(name: str) -> "Selector":
    return Selector.parse(name)


def _read(tokens: object, field: str) -> _Where:
    if isinstance(tokens, Selector):
        return tokens._where
    if isinstance(tokens, str):
        return read_choice(tokens, TOKEN_NAMES, field, aliases=TOKEN_ALIASES)
    if isinstance(tokens, Mapping):
        return _read_mapping(tokens, field)
    if isinstance(tokens, range):
        return _canonical(_range_intervals(tokens, field))
    if isinstance(tokens, tuple):
        raise SteeringError(field, "a tuple is ambiguous; write [3, 7] for two tokens or [(3, 7)] for tokens 3 to 6")
    if not isinstance(tokens, list):
        raise selector_form_error(tokens, TOKEN_NAMES, field, keys=_MAPPING_KEYS)
    if not 1 <= len(tokens) <= MAX_SELECTOR_ITEMS:
        raise SteeringError(field, f"has {len(tokens)} items; list 1 to {MAX_SELECTOR_ITEMS} positions or pairs")
    refuse_repeated(tokens, field)
    if (positions := plain_positions(tokens)) is not None:
        return tuple(sorted((*_runs(positions[positions >= 0]), *_runs(positions[positions < 0]))))
    return _canonical(_item_interval(item, f"{field}[{i}]") for i, item in enumerate(tokens))


def _read_mapping(tokens: Mapping[str, Any], field: str) -> _Generated | Span:
    names = SpanForm.__struct_fields__
    if not any(key in names or did_you_mean(key, names) for key in islice(tokens, len(names) + 1)):
        raise selector_form_error(tokens, TOKEN_NAMES, field, keys=_MAPPING_KEYS)
    form = read(SpanForm, tokens, field)
    if form.generated is None:
        return read_span(form, field)
    if len(tokens) > 1:
        raise SteeringError(field, f"has the keys {', '.join(map(str, tokens))}; give generated without any other key")
    items, path = form.generated, f"{field}.generated"
    hint = f"; {_ARRAY_HINT}" if hasattr(items, "tolist") else ""
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_SELECTOR_ITEMS:
        problem = f"must be a list of 1 to {MAX_SELECTOR_ITEMS} positions or pairs, not {shown(items)}{hint}"
        raise SteeringError(path, problem)
    refuse_repeated(items, path)
    if (positions := plain_positions(items)) is not None and positions.min() >= 0:
        return _Generated(tuple(_runs(positions)))
    intervals = [_item_interval(item, f"{path}[{i}]") for i, item in enumerate(items)]
    for i, (start, stop) in enumerate(intervals):
        if start < 0 or stop <= 0:
            raise SteeringError(f"{path}[{i}]", "must be 0 or more; positions count from the first generated token")
    return _Generated(merge_intervals(intervals))


def selector_form_error(value: object, names: Iterable[str], field: str, *, keys: str) -> SteeringError:
    """Return the error for a value that is not a selector in any form.

    Args:
        value: Any object.
        names: The valid names.
        field: Path of the value.
        keys: The keys of a valid dict, in words.
    """
    hint = ""
    if is_integer(value):
        hint = f"; write [{shown(value)}] for one position"
    elif isinstance(value, slice):
        hint = "; write [[start, stop]]"
    elif hasattr(value, "tolist"):
        hint = f"; {_ARRAY_HINT}"
    return SteeringError(
        field,
        f"must be one of {', '.join(names)}, a range, a list of positions and [start, stop] pairs, or a dict with "
        f"{keys}, not {shown(value)} ({type(value).__name__}){hint}",
    )


def plain_positions(items: Sequence[object]) -> npt.NDArray[np.int64] | None:
    """Return a list of positions without pairs as an array; None if it has other items, or wrong ones."""
    if set(map(type, items)) != {int}:
        return None
    try:
        positions = np.array(items, np.int64)
    except OverflowError:
        return None
    return positions if positions.min() > -OPEN_END and positions.max() < OPEN_END else None


def _runs(positions: npt.NDArray[np.int64]) -> list[Interval]:
    """Return the intervals of consecutive positions."""
    if not positions.size:
        return []
    ordered = np.unique(positions)
    ends = np.flatnonzero(np.diff(ordered) > 1)
    starts = ordered[np.concatenate(([0], ends + 1))]
    stops = ordered[np.concatenate((ends, [-1]))] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _item_interval(item: object, field: str) -> Interval:
    if is_integer(item):
        position = _position(item, field)
        return position, position + 1
    if isinstance(item, (bool, np.bool_)):
        raise SteeringError(field, f"must be a position, not {shown(item)}; {MASK_HINT}")
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        raise SteeringError(field, f"must be a position or a [start, stop] pair, not {shown(item)}")
    start = _position(item[0], f"{field}[0]")
    if item[1] is None:
        return start, OPEN_END
    stop = _position(item[1], f"{field}[1]")
    if stop == 0:
        raise SteeringError(field, f"[{start}, 0) is empty; for the last 3 tokens of the prompt write [-3, -2, -1]")
    # Bounds of different sign can only be compared when the prompt length is known.
    if (start < 0) == (stop < 0) and start >= stop:
        raise SteeringError(field, f"[{start}, {stop}) is empty; the start of a pair must be before its stop")
    return start, stop


def _position(value: object, field: str) -> int:
    if not is_integer(value):
        raise SteeringError(field, f"must be an integer, not {shown(value)} ({type(value).__name__})")
    if not -OPEN_END < value < OPEN_END:
        raise SteeringError(field, f"must be between {-OPEN_END + 1} and {OPEN_END - 1}, not {shown(value)}")
    return int(value)


def _range_intervals(positions: range, field: str) -> Iterable[Interval]:
    if not positions:
        raise SteeringError(field, f"{positions} is empty")
    low, high = sorted((_position(positions[0], field), _position(positions[-1], field)))
    if abs(positions.step) != 1:
        if len(positions) > MAX_SELECTOR_ITEMS:
            raise SteeringError(
                field, f"{positions} has {len(positions)} positions; a range with a step may have {MAX_SELECTOR_ITEMS}"
            )
        return [(position, position + 1) for position in positions]
    if low < 0 <= high:
        return [(low, 0), (0, high + 1)]
    return [(low, high + 1)]


def _canonical(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Sort the intervals and merge those that can be merged without the prompt length.

    Open intervals are not merged: they could absorb a position that `max_position` has to report.
    """
    absolute, relative, others = [], [], set()
    for start, stop in intervals:
        if start >= 0 and 0 < stop < OPEN_END:
            absolute.append((start, stop))
        elif start < 0 and stop <= 0:
            relative.append((start, stop))
        else:
            others.add((start, stop))
    return tuple(sorted({*merge_intervals(absolute), *merge_intervals(relative), *others}))


def merge_intervals(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the intervals in ascending order, those that overlap or touch joined."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            start, stop = merged[-1][0], max(stop, merged.pop()[1])
        merged.append((start, stop))
    return tuple(merged)


def _resolved(interval: Interval, prompt_len: int, field: str) -> Interval:
    start = interval[0] if interval[0] >= 0 else interval[0] + prompt_len
    stop = interval[1] if interval[1] > 0 else interval[1] + prompt_len
    if start < 0 or stop < 0:
        items = ", ".join(map(shown, _written(interval)))
        raise SteeringError(field, f"{items} reaches before the start of a prompt of {prompt_len} tokens")
    if start >= stop:
        hint = "; a negative stop counts from the prompt's end, null means no end" if interval[1] < 0 else ""
        raise SteeringError(
            field,
            f"[{interval[0]}, {interval[1]}] is empty for a prompt of {prompt_len} tokens: "
            f"it starts at {start} and stops before {stop}{hint}",
        )
    return start, stop


def _written(interval: Interval) -> list[int | list[int | None]]:
    start, stop = interval
    if stop == start + 1:
        return [start]
    if stop == 0:
        return [[start, -1], -1]
    return [[start, None if stop == OPEN_END else stop]]

# SPDX-License-Identifier: Apache-2.0
"""Alignment of the positions of two prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import is_integer, shown


@dataclass(frozen=True)
class Alignment:
    """Positions of the source run by positions of the patched run."""

    source_of: dict[int, int]
    """Position in the source by position in the patched run, ascending."""
    skipped: tuple[int, ...]
    """Positions of the patched run without a counterpart."""


def align(source: Sequence[int], base: Sequence[int]) -> Alignment:
    """Align the tokens of two prompts.

    Prompts of equal length are aligned position by position. Otherwise the longest equal beginning and the longest
    equal end are aligned, and the positions between them are skipped.

    Args:
        source: Tokens of the run whose activations are used.
        base: Tokens of the run that is patched.
    """
    if len(source) == len(base):
        return Alignment({i: i for i in range(len(base))}, ())
    shorter = min(len(source), len(base))
    start = _equal(zip(source, base, strict=False))
    end = min(_equal(zip(reversed(source), reversed(base), strict=False)), shorter - start)
    shift = len(source) - len(base)
    source_of = {i: i for i in range(start)} | {i: i + shift for i in range(len(base) - end, len(base))}
    return Alignment(source_of, tuple(range(start, len(base) - end)))


def _equal(pairs: Iterable[tuple[int, int]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def read_alignment(value: object, source_length: int, base_length: int, field: str) -> Alignment:
    """Return an alignment that is given as pairs of positions, (source, patched run).

    Raises:
        SteeringError: The pairs have another form, leave a prompt or repeat a position of the patched run.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise SteeringError(field, f"must be a list of pairs (position in source, in patched run), not {shown(value)}")
    source_of: dict[int, int] = {}
    for i, pair in enumerate(value):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(map(is_integer, pair)):
            raise SteeringError(f"{field}[{i}]", f"must be a pair of positions, not {shown(pair)}")
        there = _position(pair[0], source_length, f"{field}[{i}][0]")
        here = _position(pair[1], base_length, f"{field}[{i}][1]")
        if here in source_of:
            raise SteeringError(f"{field}[{i}][1]", f"repeats position {here}; align each position once")
        source_of[here] = there
    skipped = tuple(i for i in range(base_length) if i not in source_of)
    return Alignment(dict(sorted(source_of.items())), skipped)


def _position(value: int, length: int, field: str) -> int:
    position = int(value) + (length if value < 0 else 0)
    if not 0 <= position < length:
        raise SteeringError(field, f"{value} is outside of the prompt, which has {length} tokens")
    return position

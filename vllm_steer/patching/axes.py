# SPDX-License-Identifier: Apache-2.0
"""Axes of a grid: spans of layers and of positions, windows over them, and the alignment of two prompts' positions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_SELECTOR_ITEMS
from vllm_steer.patching.runner import CONTINUED
from vllm_steer.points import PointName, how_to_switch_on
from vllm_steer.request.scalars import MASK_HINT, is_integer, refuse_repeated, shown
from vllm_steer.request.sites import read_point

Span: TypeAlias = tuple[int, int]
"""Half-open range of layers or positions."""
_SPECIAL_TOKEN = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")
"""Form of the text of special tokens."""


def read_points(value: object, available: Sequence[PointName], field: str = "points") -> tuple[PointName, ...]:
    """Return the hook points of a sweep; raise SteeringError for one that the engine lacks or that repeats."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise SteeringError(field, f"must be a list of hook points, not {shown(value)}")
    points: list[PointName] = []
    for i, item in enumerate(value):
        point = read_point(item, f"{field}[{i}]")
        if point not in available:
            raise SteeringError(f"{field}[{i}]", how_to_switch_on(point))
        if point in points:
            raise SteeringError(f"{field}[{i}]", f"repeats {point}; name each point once")
        points.append(point)
    return tuple(points)


def read_layers(value: object, num_layers: int, field: str = "layers") -> tuple[Span, ...]:
    """Return the rows of a grid: ``"all"``, or a list of layers and ``[start, stop]`` pairs.

    Raises:
        SteeringError: ``value`` has another form or names a layer that the model lacks.
    """
    if isinstance(value, str) and value == "all":
        return tuple((i, i + 1) for i in range(num_layers))
    if is_integer(value):
        value = [value]
    return tuple(_span(item, num_layers, f"{field}[{i}]", "layer") for i, item in _items(value, field, "layers"))


def read_positions(value: object, pieces: Sequence[str], field: str = "positions") -> tuple[Span, ...] | None:
    """Return the columns of a grid; None for ``"all"``, which depends on the alignment.

    Args:
        value: ``"all"``, or a list of positions (negative ones from the end), ``[start, stop]`` pairs and texts as
            ``{"span": text, "occurrence": n}``.
        pieces: Text of each token of the prompt.
        field: Path of the value, for errors.

    Raises:
        SteeringError: ``value`` has another form, leaves the prompt, or has a text that the prompt lacks.
    """
    if isinstance(value, str) and value in ("all", "all_prompt"):
        return None
    if is_integer(value) or isinstance(value, dict):
        value = [value]
    spans = []
    for i, item in _items(value, field, "positions"):
        path = f"{field}[{i}]"
        spans.append(
            _find(item, pieces, path) if isinstance(item, dict) else _span(item, len(pieces), path, "position")
        )
    return tuple(spans)


def windows(spans: Sequence[Span], width: int, stop: int) -> tuple[Span, ...]:
    """Return each single item widened to ``width`` items around it, within 0 and ``stop``.

    An even window has one item more before its centre than after it.
    """
    if width == 1:
        return tuple(spans)
    return tuple((max(0, start - width // 2), min(stop, end + (width - 1) // 2)) for start, end in spans)


def read_window(value: object, field: str) -> int:
    """Return the width of a window; raise SteeringError unless it is a positive integer."""
    if not is_integer(value) or value < 1:
        raise SteeringError(field, f"must be a positive integer, not {shown(value)}")
    return int(value)


def tile(stop: int, width: int) -> tuple[Span, ...]:
    """Return the spans of ``width`` items, the last one shorter, that cover 0 to ``stop``."""
    return tuple((start, min(start + width, stop)) for start in range(0, stop, width))


def label(span: Span) -> str:
    """Return a span as text, such as ``3`` or ``3-5``."""
    return str(span[0]) if span[1] == span[0] + 1 else f"{span[0]}-{span[1] - 1}"


def find_text(text: str, pieces: Sequence[str], occurrence: int, field: str) -> Span:
    """Return the tokens that cover an occurrence of a text; spaces and line ends are not compared.

    Special tokens such as ``<|begin_of_text|>`` are found as a whole only, not by the words in them.

    Raises:
        SteeringError: The prompt does not have so many occurrences of the text.
    """
    wanted = "".join(text.split())
    if not wanted:
        raise SteeringError(field, f"{shown(text)} has no characters other than spaces")
    owners: list[int] = []
    inside: set[int] = set()
    compact = ""
    for i, piece in enumerate(pieces):
        part = "" if piece == CONTINUED else "".join(piece.split())
        if _SPECIAL_TOKEN.fullmatch(part):
            inside.update(range(len(compact) + 1, len(compact) + len(part)))
        compact += part
        owners += [i] * len(part)
    starts = [
        match.start()
        for match in re.finditer(f"(?={re.escape(wanted)})", compact)
        if inside.isdisjoint((match.start(), match.start() + len(wanted)))
    ]
    if occurrence >= len(starts):
        how_many = f"occurs {len(starts)} times" if starts else "does not occur"
        raise SteeringError(field, f"{shown(text)} {how_many} in the prompt {shown(''.join(pieces))}")
    found = starts[occurrence]
    stop = owners[found + len(wanted) - 1] + 1
    while stop < len(pieces) and pieces[stop] == CONTINUED:
        stop += 1
    return owners[found], stop


def _items(value: object, field: str, what: str) -> list[tuple[int, object]]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, (list, tuple, range)) or not value:
        raise SteeringError(
            field, f'must be "all" or a list of {what} and [start, stop] pairs{_text_form(what)}, not {shown(value)}'
        )
    if len(value) > MAX_SELECTOR_ITEMS:
        raise SteeringError(field, f"has {len(value)} items; list 1 to {MAX_SELECTOR_ITEMS} {what} or pairs")
    refuse_repeated(value, field, what.removesuffix("s"))
    return list(enumerate(value))


def _text_form(what: str) -> str:
    return ', or {"span": "Eiffel Tower"}' if what.startswith("position") else ""


def _span(item: object, stop: int, field: str, what: str) -> Span:
    if is_integer(item):
        start = int(item) + (stop if item < 0 else 0)
        end = start + 1
    elif isinstance(item, (list, tuple)) and len(item) == 2 and all(map(is_integer, item)):
        start, end = (int(each) + (stop if each < 0 else 0) for each in item)
    else:
        hint = f"; {MASK_HINT}" if isinstance(item, bool) else ""
        problem = f"must be a {what} or a [start, stop] pair{_text_form(what)}, not {shown(item)}{hint}"
        raise SteeringError(field, problem)
    if not 0 <= start < end <= stop:
        if is_integer(item):
            raise SteeringError(field, f"{what} {item} is outside of the {stop} {what}s, 0 to {stop - 1}")
        raise SteeringError(
            field,
            f"{shown(item)}: start must be below stop, and both must be between 0 and {stop}, the number of {what}s",
        )
    return start, end


def _find(item: dict[object, object], pieces: Sequence[str], field: str) -> Span:
    unknown = [key for key in item if key not in ("span", "occurrence")]
    if unknown:
        raise SteeringError(field, f"unknown key {shown(unknown[0])}; use span and occurrence")
    text, occurrence = item.get("span"), item.get("occurrence", 0)
    if not isinstance(text, str):
        raise SteeringError(f"{field}.span", f"must be a text, not {shown(text)}")
    if not is_integer(occurrence) or occurrence < 0:
        raise SteeringError(f"{field}.occurrence", f"must be a count from 0, not {shown(occurrence)}")
    return find_text(text, pieces, int(occurrence), f"{field}.span")


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

# SPDX-License-Identifier: Apache-2.0
"""From a program and a prompt's length to segments of positions, each with one row of instructions.

The selectors of a request cut its positions ``0, 1, 2, ...`` into segments; within one segment the same edits and reads
apply to every token. Scheduler and workers resolve the same bytes with the same function, so their books agree. A
pipeline stage resolves for its own layers: the same segments and rows, of which it holds only what happens on them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

import msgspec

from vllm_steer.config import MOST_SEGMENTS
from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.instructions import CAPTURE
from vllm_steer.program.program import NO_PROJECTION, CompiledEdit, CompiledRead, Program
from vllm_steer.spec.selector import OPEN_END

N_POINTS = len(POINT_NAMES)
MOST_TURNS = 2 * MOST_SEGMENTS
"""Positions at which selectors of one request may begin or end; more are refused before anybody looks at each. They
come to more segments than are served, but where an edit goes on as an equal one ends."""
PRE_ATTN = POINT_NAMES.index("pre_attn")
NO_VECTOR = NO_PROJECTION_DIGEST = b""


class Instruction(msgspec.Struct, frozen=True):
    """One operation at one site, as it stands in the device tables.

    ``vector`` is a digest; for a CAPTURE, ``index`` is the place of the captured row among those of its token.
    """

    site: int
    code: int
    vector: bytes
    strength: float
    low: float
    high: float
    index: int = 0


class Captured(msgspec.Struct, frozen=True):
    """One captured row of a token: the stream at a site, ahead of the site's edits or after them."""

    site: int
    before: bool


@dataclass(frozen=True)
class RowFormat:
    """A form in which captured rows of a token leave the engine: as they are, or projected.

    ``projection`` is the digest of the directions, or :data:`NO_PROJECTION_DIGEST`; ``directions`` are the digests of
    each.
    ``indices`` are the places of the rows among those that the token stores, ``codes`` what they are of, as
    ``2 * site + before``.
    """

    projection: bytes
    directions: tuple[bytes, ...]
    indices: tuple[int, ...]
    codes: tuple[int, ...]

    def num_bytes(self, row_bytes: int) -> int:
        """Bytes of one token in this form; a product is a float32."""
        return len(self.codes) * (4 * len(self.directions) or row_bytes)


@dataclass(frozen=True)
class TokenProgram:
    """What happens to one class of tokens; equal content has an equal digest, whatever request it came from.

    ``vectors`` are those that the row needs on the device: each edit's, then the directions of projections.
    """

    digest: bytes
    steps: tuple[CompiledEdit, ...]
    vectors: tuple[bytes, ...]
    captures: tuple[Captured, ...]
    layers: range
    forms: tuple[RowFormat, ...] = ()

    @cached_property
    def capture_codes(self) -> tuple[int, ...]:
        """``captures`` as ``2 * site + before``, the form in which rows travel."""
        return tuple(2 * captured.site + captured.before for captured in self.captures)

    @cached_property
    def instruction_count(self) -> int:
        return sum(len(_layers(step, self.layers)) for step in self.steps) + len(self.captures)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions, in order of execution within each site. A site is ``len(POINT_NAMES) * layer + point``."""
        numbered = [
            (captured.before, Instruction(captured.site, CAPTURE, NO_VECTOR, 0.0, 0.0, 0.0, index))
            for index, captured in enumerate(self.captures)
        ]
        edits = [
            Instruction(layer * N_POINTS + step.point, step.code, vector, step.strength, step.low, step.high)
            for step, vector in zip(self.steps, self.vectors, strict=False)
            for layer in _layers(step, self.layers)
        ]
        ahead = [instruction for before, instruction in numbered if before]
        after = [instruction for before, instruction in numbered if not before]
        return (*ahead, *edits, *after)


@dataclass(frozen=True)
class Segment:
    """Positions from ``start`` up to the next segment's start; ``row`` None means that nothing happens there."""

    start: int
    row: TokenProgram | None
    kv_digest: bytes | None

    @property
    def num_captures(self) -> int:
        """Rows that each token of this segment stores."""
        return 0 if self.row is None else len(self.row.captures)

    def captured_bytes(self, row_bytes: int) -> int:
        """What each token of this segment sends out of the engine."""
        return 0 if self.row is None else sum(form.num_bytes(row_bytes) for form in self.row.forms)


@dataclass(frozen=True)
class Resolved:
    """A request's segments: starts ascend from 0, and no two neighbours have the same row."""

    segments: tuple[Segment, ...]

    @cached_property
    def rows(self) -> tuple[TokenProgram, ...]:
        """The distinct rows, in order of first use."""
        return tuple({s.row.digest: s.row for s in self.segments if s.row is not None}.values())

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(segment.start for segment in self.segments)

    @cached_property
    def edits(self) -> bool:
        """Whether any token is edited."""
        return any(row.steps for row in self.rows)

    @cached_property
    def max_captures(self) -> int:
        """Most rows that any one token stores; 0 for a request that reads nothing."""
        return max((segment.num_captures for segment in self.segments), default=0)

    @cached_property
    def active(self) -> tuple[int, int]:
        """The positions ``[low, high)`` outside which no token has a row."""
        return self._extent([segment.row is not None for segment in self.segments])

    @cached_property
    def reading(self) -> tuple[int, int]:
        """The positions ``[low, high)`` outside which no token is read."""
        return self._extent([segment.num_captures > 0 for segment in self.segments])

    def _extent(self, inside: list[bool]) -> tuple[int, int]:
        if not any(inside):
            return (0, 0)
        last = len(inside) - 1 - inside[::-1].index(True)
        end = self.starts[last + 1] if last + 1 < len(self.starts) else OPEN_END
        return self.starts[inside.index(True)], end

    @cached_property
    def first_captured(self) -> int | None:
        """The first position that is read; None for a request that reads nothing."""
        return next((segment.start for segment in self.segments if segment.num_captures), None)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, Segment]]:
        """``(from, to, segment)`` of each segment that meets the positions ``start`` up to ``stop``, in order."""
        index = max(bisect_right(self.starts, start) - 1, 0)
        while start < stop:
            end = self.starts[index + 1] if index + 1 < len(self.segments) else stop
            yield start, min(end, stop), self.segments[index]
            start, index = min(end, stop), index + 1

    def bytes_in_all(self, prompt_len: int, max_tokens: int, row_bytes: int) -> int:
        """Most bytes that a request captures until it ends, with rows of ``row_bytes``; its last sampled token is never
        forwarded."""
        if not self.max_captures:
            return 0
        stop = prompt_len + max(max_tokens, 1) - 1
        return sum((to - from_) * segment.captured_bytes(row_bytes) for from_, to, segment in self.spans(0, stop))


_MOST_LENGTHS = 64


def resolve(
    program: Program, prompt_len: int, num_layers: int, own: range | None = None, most: int = MOST_SEGMENTS
) -> Resolved:
    """Segments of ``program`` for a prompt of ``prompt_len`` tokens on a model of ``num_layers`` decoder layers.

    ``own``: the layers of a pipeline stage, to which the rows' instructions and captures are then limited.
    Raises :class:`~vllm_steer.errors.SteeringError` where a selector counts back beyond the prompt's first token, and,
    before any more of them are made, where there are more than ``most`` segments.
    """
    # Requests with equal programs share the program: with prompts of one length they share this too.
    kept, key = program.resolved, (prompt_len, num_layers, own)
    found: Resolved | None = kept.get(key)
    if found is None:
        found = Resolved(tuple(islice(_segments(program, *key), most + 1)))
    if len(found.segments) > most:
        raise SteeringError("steering", f"needs more than {most} of max_segments: it can never fit")
    if key not in kept:
        if len(kept) >= _MOST_LENGTHS:
            kept.clear()
        kept[key] = found
    return found


def _segments(program: Program, prompt_len: int, num_layers: int, own: range | None) -> Iterator[Segment]:
    edited = len(program.steps)
    turns = _turns(program, prompt_len)
    covering: set[int] = set()
    before: Segment | None = None
    digests = [step.digest for step in program.steps]
    content: tuple[list[bytes], list[int]] | None = None
    for start in sorted(turns):
        covering ^= turns[start]
        parts = sorted(covering)
        split = bisect_left(parts, edited)
        # Where one part takes over from an equal one, nothing begins: no limit of segments ends such a row of turns.
        last, content = content, ([digests[part] for part in parts[:split]], parts[split:])
        if content == last:
            continue
        steps = tuple(program.steps[part] for part in parts[:split])
        reads = tuple(program.reads[part - edited] for part in parts[split:])
        row = _row(steps, reads, program, num_layers, own) if parts else None
        if before is None or _digest_of(before.row) != _digest_of(row):
            before = Segment(start, row, _kv_digest(steps, num_layers))
            yield before


def _turns(program: Program, prompt_len: int) -> dict[int, set[int]]:
    """Position -> the parts, edits first and then reads, that begin or cease to cover it there."""
    turns: dict[int, set[int]] = {0: set()}
    selectors = [(step.selector, "tokens") for step in program.steps]
    selectors += [(read.selector, "positions") for read in program.reads]
    for part, (selector, field) in enumerate(selectors):
        # The intervals of one selector do not touch, so that no bound is there twice.
        for bound in chain.from_iterable(selector.intervals(prompt_len, field)):
            if bound < OPEN_END:
                turns.setdefault(bound, set()).add(part)
        if len(turns) > MOST_TURNS:
            raise SteeringError(
                field,
                f"edits and reads begin or end at more than {MOST_TURNS} positions, and max_segments is at most "
                f"{MOST_SEGMENTS}; a longer stretch is one pair",
            )
    return turns


def _digest_of(row: TokenProgram | None) -> bytes | None:
    return None if row is None else row.digest


def _layers(part: CompiledEdit | CompiledRead, layers: range) -> range | tuple[int, ...]:
    return tuple(layer for layer in part.layers if layer in layers) if part.layers else layers


def _row(
    steps: tuple[CompiledEdit, ...],
    reads: tuple[CompiledRead, ...],
    program: Program,
    num_layers: int,
    own: range | None,
) -> TokenProgram:
    every = range(num_layers)
    wanted = {
        (layer * N_POINTS + read.point, read.before, read.projection)
        for read in reads
        for layer in _layers(read, every)
    }
    captures = tuple(Captured(site, before) for site, before in sorted({each[:2] for each in wanted}))
    names = {NO_PROJECTION: NO_PROJECTION_DIGEST, **dict(enumerate(program.projection_digests))}
    content = [step.digest for step in steps]
    content += sorted(b"read%d:%d:%s" % (site, before, names[projection]) for site, before, projection in wanted)
    digest = hashlib.blake2b(b"|".join(content), digest_size=16).digest()
    if own is not None:
        captures = tuple(captured for captured in captures if captured.site // N_POINTS in own)
    places = {(captured.site, captured.before): index for index, captured in enumerate(captures)}
    forms: list[RowFormat] = []
    directions: list[bytes] = []
    for projection in sorted({each[2] for each in wanted}):
        there = sorted((site, before) for site, before, of in wanted if of == projection and (site, before) in places)
        needed = () if projection == NO_PROJECTION else program.directions(projection)
        directions += needed
        if there:
            codes = tuple(2 * site + before for site, before in there)
            forms.append(RowFormat(names[projection], needed, tuple(places[each] for each in there), codes))
    vectors = (*(program.digests[step.vector] for step in steps), *dict.fromkeys(directions))
    return TokenProgram(digest, steps, vectors, captures, every if own is None else own, tuple(forms))


def _kv_digest(steps: tuple[CompiledEdit, ...], num_layers: int) -> bytes | None:
    """Digest of the edits that can change a token's keys and values; None where there is none.

    The last layer's keys and values come from its ``pre_attn`` stream, so its later points, branches included, change
    no cache entry. Reads change nothing.
    """
    last = num_layers - 1
    parts = [
        step.digest
        for step in steps
        if step.point == PRE_ATTN or any(layer < last for layer in _layers(step, range(num_layers)))
    ]
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest() if parts else None

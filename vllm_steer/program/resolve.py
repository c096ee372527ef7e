# SPDX-License-Identifier: Apache-2.0
"""Resolution of a program for a prompt length: token positions to segments, each with one token program.

The selectors of a request cut its positions ``0, 1, 2, ...`` into segments. Within a segment the same edits and
captures apply to every token. Scheduler and workers resolve the same bytes with the same function, so their tables
agree. A pipeline stage resolves for its own layers: it gets the same segments with the instructions of its layers only.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from weakref import WeakValueDictionary

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import ENGINE_LIMITS, MAX_BOUNDARIES, MAX_SEGMENTS
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_capture import NO_PROJECTION, CompiledCapture
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.position_runs import EditStep, PositionRun, covered_intervals, edit_steps
from vllm_steer.program.program import Program
from vllm_steer.program.records import TOKEN, RequestRecords
from vllm_steer.program.resolve_records import read_intervals, resolve_records
from vllm_steer.program.token_program import (
    N_POINTS,
    UNPROJECTED,
    CaptureSite,
    Gate,
    HeadRead,
    MlpRead,
    Read,
    RowFormat,
    TokenProgram,
    layers_of,
    pack_columns,
)
from vllm_steer.request.selector import OPEN_END

PRE_ATTN = POINT_NAMES.index("pre_attn")
_MAX_CACHED = 64
"""Resolutions cached per program."""
_SHARED: WeakValueDictionary[tuple[int, range | None, bytes], TokenProgram] = WeakValueDictionary()
"""Token programs in use, by layers and digest."""


class _RecordParts(msgspec.Struct, frozen=True, array_like=True):
    """What a token reads, its gates, and the packed columns of the factors of its edits."""

    reads: tuple[Read, ...]
    gates: tuple[Gate, ...]
    factors: tuple[int, ...]
    heads: tuple[HeadRead, ...] = ()


class _EditParts(msgspec.Struct, frozen=True, array_like=True):
    """The edits of a segment, their steps, and the runs of operands that the steps refer to."""

    edits: tuple[CompiledEdit, ...]
    steps: tuple[tuple[EditStep, ...], ...]
    runs: tuple[PositionRun, ...]


@dataclass(frozen=True)
class Segment:
    """The positions from ``start`` up to the next segment's start."""

    start: int
    program: TokenProgram | None
    """Program of each token; None if it is neither edited nor captured."""
    kv_digest: bytes | None
    """Digest of the edits that can change keys and values of these tokens; None if there are none."""

    @property
    def num_captures(self) -> int:
        """Number of rows that each token captures."""
        return 0 if self.program is None else len(self.program.captures)

    def captured_bytes(self, row_bytes: int) -> int:
        """Return the bytes of captured rows that leave the engine for each token."""
        return 0 if self.program is None else sum(f.num_bytes(row_bytes) for f in self.program.row_formats)


@dataclass(frozen=True)
class Resolved:
    """The segments of a request: starts ascend from 0, and neighbours have different token programs."""

    segments: tuple[Segment, ...]
    records: RequestRecords | None = None
    """Readouts, gates, stops and live strengths; None if the request has none."""

    @cached_property
    def token_programs(self) -> tuple[TokenProgram, ...]:
        """The distinct token programs, in order of first use."""
        return tuple({s.program.digest: s.program for s in self.segments if s.program is not None}.values())

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The start of each segment."""
        return tuple(segment.start for segment in self.segments)

    @cached_property
    def has_edits(self) -> bool:
        """Whether any token is edited."""
        return any(program.edits for program in self.token_programs)

    @cached_property
    def max_captures(self) -> int:
        """Largest number of rows that one token captures; 0 for a request without captures."""
        return max((segment.num_captures for segment in self.segments), default=0)

    @cached_property
    def has_heads(self) -> bool:
        """Whether a head reads any token."""
        return any(program.heads for program in self.token_programs)

    @cached_property
    def active_range(self) -> tuple[int, int]:
        """Smallest range of positions ``[start, stop)`` that contains all edited and captured tokens."""
        return self._range_of([segment.program is not None for segment in self.segments])

    @cached_property
    def captured_range(self) -> tuple[int, int]:
        """Smallest range of positions ``[start, stop)`` that contains all captured tokens."""
        return self._range_of([segment.num_captures > 0 for segment in self.segments])

    def _range_of(self, included: list[bool]) -> tuple[int, int]:
        if not any(included):
            return (0, 0)
        last = len(included) - 1 - included[::-1].index(True)
        stop = self.starts[last + 1] if last + 1 < len(self.starts) else OPEN_END
        return self.starts[included.index(True)], stop

    @cached_property
    def first_captured_position(self) -> int | None:
        """First position that is captured; None for a request without captures."""
        return next((segment.start for segment in self.segments if segment.num_captures), None)

    @cached_property
    def first_needed_position(self) -> int | None:
        """First position that must be computed rather than taken from the prefix cache; None if there is none."""
        first = self.first_captured_position
        other = None if self.records is None else self.records.first_needed
        return min((each for each in (first, other) if each is not None), default=None)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, Segment]]:
        """Yield ``(start, stop, segment)`` for each segment that overlaps positions ``[start, stop)``, in order."""
        index = max(bisect_right(self.starts, start) - 1, 0)
        while start < stop:
            end = self.starts[index + 1] if index + 1 < len(self.segments) else stop
            yield start, min(end, stop), self.segments[index]
            start, index = min(end, stop), index + 1

    def total_bytes(self, prompt_len: int, max_tokens: int, row_bytes: int) -> int:
        """Return the most bytes that the request captures until it ends.

        Args:
            prompt_len: number of prompt tokens.
            max_tokens: most tokens to generate; the last one is sampled but not run through the model.
            row_bytes: size of an unprojected row.
        """
        if not self.max_captures:
            return 0
        spans = self.spans(0, prompt_len + max(max_tokens, 1) - 1)
        return sum((stop - start) * segment.captured_bytes(row_bytes) for start, stop, segment in spans)


def resolve(
    program: Program,
    prompt_len: int,
    num_layers: int,
    stage_layers: range | None = None,
    max_segments: int = MAX_SEGMENTS,
    caches_behind_attention: bool = False,
) -> Resolved:
    """Resolve a program for a prompt length.

    Args:
        program: the program.
        prompt_len: number of prompt tokens.
        num_layers: number of decoder layers of the model.
        stage_layers: layers of this pipeline stage, to which instructions and captures are restricted; None for all.
        max_segments: most segments to make.
        caches_behind_attention: whether the last layer caches more than the keys and values of its attention.

    Raises:
        SteeringError: a selector reaches before the first token of the prompt, or the program needs more than
            ``max_segments`` segments.
    """
    # Requests with equal programs share the program object and therefore this cache.
    cache, key = program.resolve_cache, (prompt_len, num_layers, stage_layers, caches_behind_attention)
    resolved: Resolved | None = cache.get(key)
    if resolved is None:
        records = resolve_records(program, prompt_len) if program.has_records else None
        resolved = Resolved(tuple(islice(_segments(program, *key), max_segments + 1)), records)
    if len(resolved.segments) > max_segments:
        raise SteeringError(
            "steering",
            f"needs more than {max_segments} token segments, the engine's max_segments; use fewer token ranges or "
            f"{ENGINE_LIMITS['max_segments'].how_to_raise}",
        )
    if key not in cache:
        if len(cache) >= _MAX_CACHED:
            cache.clear()
        cache[key] = resolved
    return resolved


def _segments(
    program: Program, prompt_len: int, num_layers: int, stage_layers: range | None, caches_behind_attention: bool
) -> Iterator[Segment]:
    last = None if caches_behind_attention else num_layers - 1
    num_edits, num_captures = len(program.edits), len(program.captures)
    previous: Segment | None = None
    for start, stop, parts in _spans(program, prompt_len):
        split, end = bisect_left(parts, num_edits), bisect_left(parts, num_edits + num_captures)
        captures = tuple(program.captures[part - num_edits] for part in parts[split:end])
        steps = edit_steps(program, parts[:split], prompt_len, start, stop)
        parts_of_edits = _EditParts(tuple(program.edits[part] for part in parts[:split]), *steps)
        recorded = _record_parts(program, parts[:split], [part - num_edits - num_captures for part in parts[end:]])
        token_program = (
            _token_program(parts_of_edits, captures, program, num_layers, stage_layers, recorded) if parts else None
        )
        if token_program is not None:
            # Equal token programs of requests with equal programs and other prompt lengths are one object.
            token_program = _SHARED.setdefault((num_layers, stage_layers, token_program.digest), token_program)
        # The operands of a matrix count from the start of their segment.
        is_new = previous is None or parts_of_edits.runs or _digest_of(previous.program) != _digest_of(token_program)
        if is_new:
            previous = Segment(start, token_program, _kv_digest(parts_of_edits, num_layers, last, program, prompt_len))
            yield previous


def _spans(program: Program, prompt_len: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield ``(start, stop, parts)`` for stretches of positions with the same edits, captures and readouts.

    An edit that replaces an equal one begins no stretch, so such boundaries do not count against max_segments, unless
    the edit is gated: each gated edit writes its factor to a column of its own.
    """
    num_edits = len(program.edits)
    boundaries = _boundaries(program, prompt_len)
    # Edits with a matrix have other operands at other positions, and gated ones other columns, so they equal only
    # themselves.
    content_of = [
        number if edit.num_rows or edit.is_gated else edit.digest for number, edit in enumerate(program.edits)
    ]
    content_of += range(num_edits, num_edits + len(program.captures) + len(program.readouts))
    active: set[int] = set()
    begun: tuple[int, list[int]] | None = None
    content: list[int | bytes] = []
    for position in sorted(boundaries):
        active ^= boundaries[position]
        parts = sorted(active)
        last, content = content, [content_of[part] for part in parts]
        if begun is not None and content == last:
            continue
        if begun is not None:
            yield begun[0], position, begun[1]
        begun = position, parts
    if begun is not None:
        yield begun[0], OPEN_END, begun[1]


def _record_parts(program: Program, edits: list[int], readouts: list[int]) -> _RecordParts | None:
    """Return the reads, gates and factors of a token with these edits and readouts."""
    if not program.has_records:
        return None
    layout = program.layout
    chosen = [(program.readouts[number], layout.readouts[number]) for number in readouts]
    reads = [
        Read(readout.site_number, column + i, program.digests[vector], readout.bias, readout.form)
        for readout, column in chosen
        for i, vector in enumerate(() if readout.mlp else readout.vectors)
    ]
    gates = [
        Gate(
            program.readouts[each.readout].site_number,
            layout.readouts[each.readout],
            layout.gates[number],
            each.bound.threshold,
            1.0 if each.bound.above else -1.0,
            each.sharpness,
        )
        for number in edits
        for each in program.edits[number].when
        if each.kind == TOKEN
    ]
    factors = [
        pack_columns(layout.gates.get(number, 0), layout.live.get(program.edits[number].live, 0)) for number in edits
    ]
    heads = [
        HeadRead(
            layer * N_POINTS + readout.point,
            column + 2 * readout.top_k * i,
            readout.head,
            readout.top_k,
            targets=readout.targets,
        )
        for readout, column in chosen
        for i, layer in enumerate(readout.layers)
    ]
    for readout, column in chosen:
        if (mlp := readout.mlp) is not None:
            vectors = tuple(program.digests[index] for index in readout.vectors)
            probe = MlpRead(vectors, mlp.biases, mlp.outputs, readout.bias, mlp.activation, readout.sigmoid)
            heads.append(HeadRead(readout.site_number, column, "", 0, probe))
    return _RecordParts(tuple(reads), tuple(gates), tuple(factors) if any(factors) else (), tuple(heads))


def _boundaries(program: Program, prompt_len: int) -> dict[int, set[int]]:
    """Return, for each position, the parts (edits, captures, readouts) that begin or cease to cover it there."""
    boundaries: dict[int, set[int]] = {0: set()}
    covered = [(covered_intervals(program, i, prompt_len), program.edit_source(i)) for i in range(len(program.edits))]
    for i, capture in enumerate(program.captures):
        field = f"{program.capture_source(i)}.positions"
        covered.append((capture.selector.intervals(prompt_len, field), field))
    covered += [
        (read_intervals(program, i, prompt_len), f"{program.readout_source(i)}.positions")
        for i in range(len(program.readouts))
    ]
    for part, (intervals, field) in enumerate(covered):
        # The intervals of one part do not touch, so no boundary is added twice.
        for position in chain.from_iterable(intervals):
            if position < OPEN_END:
                boundaries.setdefault(position, set()).add(part)
        if len(boundaries) > MAX_BOUNDARIES:
            raise SteeringError(
                field,
                f"edits and captures of the request begin or end at more than {MAX_BOUNDARIES} positions; "
                "replace neighbouring positions by [start, stop] pairs",
            )
    return boundaries


def _digest_of(program: TokenProgram | None) -> bytes | None:
    return None if program is None else program.digest


def _token_program(
    edits: _EditParts,
    captures: tuple[CompiledCapture, ...],
    program: Program,
    num_layers: int,
    stage_layers: range | None,
    recorded: _RecordParts | None,
) -> TokenProgram:
    every = range(num_layers)
    wanted = {
        (layer * N_POINTS + capture.point, capture.before, capture.projection)
        for capture in captures
        for layer in layers_of(capture, every)
    }
    heads = () if recorded is None else recorded.heads
    stored = {each[:2] for each in wanted} | {(head.site_number, False) for head in heads}
    layers = every if stage_layers is None else stage_layers
    captured_sites = tuple(CaptureSite(*each) for each in sorted(stored) if each[0] // N_POINTS in layers)
    names = {NO_PROJECTION: UNPROJECTED, **dict(enumerate(program.projection_digests))}
    content = [edit.digest for edit in edits.edits]
    if edits.runs:
        content.append(b"runs:" + msgspec.msgpack.encode(edits.runs))
    content += sorted(b"read%d:%d:%s" % (number, before, names[projection]) for number, before, projection in wanted)
    if recorded is not None:
        content.append(b"dynamic:" + msgspec.msgpack.encode(recorded))
    digest = hashlib.blake2b(b"|".join(content), digest_size=16).digest()
    index_of = {captured: index for index, captured in enumerate(captured_sites)}
    row_formats: list[RowFormat] = []
    directions: list[bytes] = []
    for projection in sorted({each[2] for each in wanted}):
        rows = [CaptureSite(*each[:2]) for each in sorted(wanted) if each[2] == projection]
        rows = [row for row in rows if row in index_of]
        needed = () if projection == NO_PROJECTION else program.directions(projection)
        directions += needed
        if rows:
            indices, codes = tuple(index_of[row] for row in rows), tuple(row.code for row in rows)
            row_formats.append(RowFormat(names[projection], needed, indices, codes))
    if recorded is not None:
        directions += [read.vector for read in recorded.reads]
        directions += [digest for head in heads if head.mlp for digest in head.mlp.vectors]
    needed_by_edits = [
        program.digests[index]
        for edit in edits.edits
        for index in (edit.vectors if edit.coordinates or not edit.num_rows else edit.vectors[:1])
    ]
    needed_by_edits += [digest for run in edits.runs for digest in dict.fromkeys(run.vectors) if digest]
    vectors = (*needed_by_edits, *dict.fromkeys(directions))
    if recorded is None:
        recorded = _RecordParts((), (), ())
    return TokenProgram(
        digest,
        edits.edits,
        vectors,
        captured_sites,
        layers,
        tuple(row_formats),
        recorded.reads,
        recorded.gates,
        recorded.factors,
        edits.steps,
        edits.runs,
        tuple((head, index_of[CaptureSite(head.site_number, False)]) for head in heads),
    )


def _kv_digest(parts: _EditParts, num_layers: int, last: int | None, program: Program, prompt_len: int) -> bytes | None:
    """Return the digest of the edits that can change a token's keys and values; None if there are none.

    The factor of a gated edit depends on all readouts and edits and, except in the window ``token``, on the length of
    the prompt. That of an edit in a part of the output depends on the tokens, which are part of the keys, and on the
    length of the prompt.

    The layer ``last`` computes its keys and values from its ``pre_attn`` stream, so edits at its later points, branches
    included, change no cache entry. It is None in models whose last layer caches more. Reads change nothing. A matrix
    counts only with its rows at these positions, each at its distance from the start of the segment, which is part of
    the keys.
    """
    edits = parts.edits
    digests: list[bytes] = []
    for edit, steps in zip(edits, parts.steps, strict=True):
        if steps and (edit.point == PRE_ATTN or any(layer != last for layer in layers_of(edit, range(num_layers)))):
            digests.append(edit.digest)
            if edit.num_rows:
                digests.append(msgspec.msgpack.encode([parts.runs[step.run] for step in steps]))
    if not digests:
        return None
    if any(edit.when for edit in edits):
        digests.append(program.records_digest)
    if any(edit.parts or any(each.kind != TOKEN for each in edit.when) for edit in edits):
        digests.append(b"prompt%d" % prompt_len)
    return hashlib.blake2b(b"".join(digests), digest_size=16).digest()

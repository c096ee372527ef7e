# SPDX-License-Identifier: Apache-2.0
"""Resolution of readouts, conditions and stops for a prompt length."""

from __future__ import annotations

from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.program.compiled_part import MAX_BREAKS, NO_TOKEN, CompiledPart
from vllm_steer.program.program import Program
from vllm_steer.program.records import (
    OF_PROMPT,
    PART,
    PROMPT_MEAN,
    STOP,
    STOP_COLUMN,
    TOKEN,
    CompiledBound,
    CompiledCondition,
    DeviceCondition,
    RequestRecords,
)
from vllm_steer.request.condition import condition_source
from vllm_steer.request.selector import OPEN_END, Interval, merge_intervals


def read_intervals(program: Program, readout: int, prompt_len: int) -> tuple[Interval, ...]:
    """Return the positions at which a readout is computed: those it returns and those that conditions need.

    The windows ``previous`` and ``latch`` look at the tokens from the last one of the prompt on, stops at generated
    tokens, and the window ``token`` at the edited tokens.

    Raises:
        SteeringError: A selector does not fit the prompt.
    """
    intervals = list(
        program.readouts[readout].selector.intervals(prompt_len, f"{program.readout_source(readout)}.positions")
    )
    for number, edit in enumerate(program.edits):
        for i, condition in enumerate(edit.when):
            if condition.readout != readout:
                continue
            field = condition_source(program.edit_source(number), i, len(edit.when))
            if condition.kind == TOKEN:
                intervals += edit.selector.intervals(prompt_len, f"{program.edit_source(number)}.tokens")
            elif condition.kind in OF_PROMPT:
                intervals.append(_prompt_interval(condition, prompt_len, field))
            else:
                intervals.append((prompt_len - 1, OPEN_END))
    if any(stop.readout == readout for stop in program.stops):
        intervals.append((prompt_len, OPEN_END))
    return merge_intervals(intervals)


def resolve_records(program: Program, prompt_len: int) -> RequestRecords:
    """Resolve the dynamic parts of a program.

    Raises:
        SteeringError: A selector does not fit the prompt, or a window cannot decide about a token of its edit.
    """
    layout = program.layout
    conditions: list[DeviceCondition] = []
    needed: list[int] = []
    returned: list[Interval] = []
    for number, readout in enumerate(program.readouts):
        intervals = readout.selector.intervals(prompt_len, f"{program.readout_source(number)}.positions")
        returned += intervals
        needed.append(intervals[0][0])
    for selection, column in layout.parts.items():
        conditions += _resolve_parts(selection, column, prompt_len)
    decided = set(layout.parts.values())
    for number, edit in enumerate(program.edits):
        source = program.edit_source(number)
        target = layout.gates.get(number, STOP_COLUMN)
        own = _resolve_parts(edit.parts, target, prompt_len)
        for i, condition in enumerate(edit.when):
            if condition.kind == TOKEN:
                continue
            field = condition_source(source, i, len(edit.when))
            first = edit.selector.intervals(prompt_len, f"{source}.tokens")[0][0]
            if first < prompt_len:
                raise SteeringError(
                    f"{field}.window",
                    f"decides about generated tokens only, but the edit covers position {first} of the prompt; use "
                    'tokens="generated", or the window "token"',
                )
            score, mask = layout.readouts[condition.readout], layout.parts.get(condition.parts, 0)
            own.append(_resolve_condition(condition, score, target, mask, prompt_len, field))
            if condition.kind in OF_PROMPT:
                needed.append(own[-1].first)
        # Edits with equal conditions share a column.
        if target not in decided:
            conditions += own
            decided.add(target)
    for number, stop in enumerate(program.stops):
        conditions.append(
            DeviceCondition(
                kind=STOP,
                score=layout.readouts[stop.readout],
                target=STOP_COLUMN,
                first=prompt_len,
                stop=OPEN_END,
                count=stop.tokens,
                start=prompt_len,
                number=number + 1,
                mask=layout.parts.get(stop.parts, 0),
                **_numbers(stop.bound, 0.0, None),
            )
        )
    gated = bool(layout.gates or layout.live)
    starts = [start for start, _ in returned]
    stops = [stop for _, stop in returned]
    if gated:
        # Decisions about every token are kept, since a preempted request repeats them.
        starts, stops = [0], [OPEN_END]
    elif program.stops or layout.parts:
        starts.append(prompt_len)
        stops.append(OPEN_END)
    return RequestRecords(
        layout,
        tuple(conditions),
        min((each for each in needed if each < OPEN_END), default=None),
        min(starts),
        max(stops),
        gated or bool(conditions),
    )


def _resolve_condition(
    condition: CompiledCondition, score: int, target: int, mask: int, prompt_len: int, field: str
) -> DeviceCondition:
    # The last prompt token is in no part of the output.
    first, stop = prompt_len if mask else prompt_len - 1, OPEN_END
    if condition.kind in OF_PROMPT:
        first, stop = _prompt_interval(condition, prompt_len, field)
    return DeviceCondition(
        kind=condition.kind,
        score=score,
        target=target,
        first=first,
        stop=stop,
        count=stop - first if condition.kind == PROMPT_MEAN else condition.count,
        start=prompt_len,
        number=0,
        alpha=condition.alpha,
        mask=mask,
        **_numbers(condition.bound, condition.sharpness, condition.release),
    )


def _resolve_parts(parts: tuple[CompiledPart, ...], column: int, prompt_len: int) -> list[DeviceCondition]:
    """Return the conditions that make a column 0 for generated tokens that are not in all ``parts``."""
    return [
        DeviceCondition(
            kind=PART,
            score=_token(part.start),
            target=column,
            first=prompt_len,
            stop=OPEN_END,
            count=_token(part.end),
            start=prompt_len,
            number=int(part.outside),
            opened=part.opened,
            breaks=(*part.breaks, *[NO_TOKEN] * (MAX_BREAKS - len(part.breaks))),
            **_numbers(CompiledBound(True, 0.0), 0.0, None),
        )
        for part in parts
    ]


def _token(marker: int | str) -> int:
    # Before the front end has filled in the ids, no token matches.
    return marker if isinstance(marker, int) else NO_TOKEN


def _numbers(bound: CompiledBound, sharpness: float, release: CompiledBound | None) -> dict[str, Any]:
    return {
        "threshold": bound.threshold,
        "sign": 1.0 if bound.above else -1.0,
        "sharpness": sharpness,
        "release": 0.0 if release is None else release.threshold,
        "release_sign": 0.0 if release is None else 1.0 if release.above else -1.0,
    }


def _prompt_interval(condition: CompiledCondition, prompt_len: int, field: str) -> Interval:
    if condition.selector is None:
        return 0, prompt_len
    intervals = condition.selector.intervals(prompt_len, f"{field}.positions")
    if len(intervals) != 1 or intervals[0][1] > prompt_len:
        found = f"{len(intervals)} ranges" if len(intervals) > 1 else "positions after the prompt"
        raise SteeringError(
            f"{field}.positions",
            f'selects {found}, but the window "prompt" reads one range within the prompt of {prompt_len} tokens',
        )
    return intervals[0]

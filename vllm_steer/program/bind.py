# SPDX-License-Identifier: Apache-2.0
"""Binding of a program to a prompt: the tokens and the state of parts, and the positions of messages and images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_SELECTOR_ITEMS
from vllm_steer.program.part import CompiledPart, Markers, bound_parts
from vllm_steer.program.program import Program
from vllm_steer.request.condition import condition_source, stop_source
from vllm_steer.request.part import IMAGE, PROMPT_PARTS
from vllm_steer.request.selector import OPEN_END, Wire

FindMarkers = Callable[[CompiledPart, str], Markers | None]
Ranges = Sequence[tuple[int, int]]
FindRanges = Callable[[str, str], Ranges]


def bind_to_prompt(program: Program, message: Sequence[int], ranges: FindRanges, find: FindMarkers) -> Program:
    """Return the program with everything filled in that depends on the model's tokens and on the prompt.

    Args:
        program: The program.
        message: The tokens of the message that the prompt leaves open, which alone decide whether a part has begun.
        ranges: Returns the positions of messages or images as ascending ranges; the stop of an open one is
            ``OPEN_END``. It gets the name of the part and the path of the field.
        find: Returns the markers of a part, or None to leave the part out. It gets the path of the field.

    Raises:
        SteeringError: The tokens of a part are not known, or the prompt has no such message or image.
    """

    def parts_of(parts: tuple[CompiledPart, ...], field: str) -> tuple[CompiledPart, ...]:
        return bound_parts(parts, lambda part: find(part, field), message) if parts else parts

    edits = []
    for number, edit in enumerate(program.edits):
        source = program.edit_source(number)
        when = []
        for i, condition in enumerate(edit.when):
            field = f"{condition_source(source, i, len(edit.when))}.positions"
            tokens = None if condition.tokens is None else _positions(condition.tokens, ranges, field)
            when.append(msgspec.structs.replace(condition, tokens=tokens, parts=parts_of(condition.parts, field)))
        bound = msgspec.structs.replace(
            edit,
            tokens=_positions(edit.tokens, ranges, f"{source}.tokens"),
            parts=parts_of(edit.parts, f"{source}.tokens"),
            when=tuple(when),
        )
        edits.append(edit if bound == edit else bound.with_strength(bound.strength, program.digests))
    readouts = []
    for number, readout in enumerate(program.readouts):
        field = f"{program.readout_source(number)}.positions"
        tokens = _positions(readout.tokens, ranges, field)
        readouts.append(msgspec.structs.replace(readout, tokens=tokens, parts=parts_of(readout.parts, field)))
    stops = [
        msgspec.structs.replace(stop, parts=parts_of(stop.parts, f"{stop_source(i)}.positions"))
        for i, stop in enumerate(program.stops)
    ]
    return msgspec.structs.replace(program, edits=tuple(edits), readouts=tuple(readouts), stops=tuple(stops))


def _positions(tokens: Wire, ranges: FindRanges, field: str) -> Wire:
    if not isinstance(tokens, str) or tokens not in PROMPT_PARTS:
        return tokens
    found = ranges(tokens, field)
    if not found:
        what = "images" if tokens == IMAGE else f"messages of the role {tokens}"
        raise SteeringError(field, f"selects {what}, but the prompt has none")
    if len(found) > MAX_SELECTOR_ITEMS:
        raise SteeringError(
            field, f"selects {len(found)} ranges of tokens of this prompt; at most {MAX_SELECTOR_ITEMS} are allowed"
        )
    return [[start, None if stop == OPEN_END else stop] for start, stop in found]

# SPDX-License-Identifier: Apache-2.0
"""Edits, conditions, readouts and stops of a finished sample that no token reached.

All prompt tokens and all generated tokens but the last run through the model; the last as well if its readout has
ended the sample. Whether a selection has one of them follows from its selector and the number of tokens or, for a part
of the output, from the tokens themselves, so the engine reports nothing. Prefix caching does not matter,
because a block is only reused under the same edits; neither do preemption and rejected drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from vllm_steer.params import program_of
from vllm_steer.program.part import CompiledPart, selector_of
from vllm_steer.registry.schema import NoEffect
from vllm_steer.request import Selector

Unreached: TypeAlias = tuple[tuple[str, Selector], ...]
"""Path and selector of each selection that a sample did not reach."""

_SELECTIONS, _PARTS = "_steering_selections", "_steering_parts"
_BY_SAMPLE = "_steering_unreached"
_LISTENER = "_steering_reach_listener"


def record_selections(output_processor: Any, request: Any) -> None:
    """Store the selectors of a sample's program on its state."""
    program = program_of(request.sampling_params)
    if program is not None:
        state = output_processor.request_states[request.request_id]
        if selections := program.selections:
            setattr(state, _SELECTIONS, selections)
        if parts := program.selected_parts:
            setattr(state, _PARTS, parts)


def on_reach(state: Any, listener: Callable[[Any, Unreached], None]) -> None:
    """Call ``listener(state, unreached)`` when a sample with edits or readouts has finished."""
    setattr(state, _LISTENER, listener)


def record_reach(state: Any, num_forwarded: int) -> None:
    """Record what a sample that has finished did not reach.

    Args:
        state: vLLM's state of the sample.
        num_forwarded: Number of its prompt and generated tokens that ran through the model.
    """
    selections: tuple[tuple[Selector, tuple[str, ...]], ...] = getattr(state, _SELECTIONS, ())
    parts: tuple[tuple[tuple[CompiledPart, ...], str], ...] = getattr(state, _PARTS, ())
    if not selections and not parts:
        return
    # Without a generated token, no result depends on the edits, however much of the prompt was computed, unless a
    # readout of the prompt has ended the sample.
    stop = num_forwarded if num_forwarded >= state.prompt_len else 0
    unreached = tuple(
        (path, selector)
        for selector, paths in selections
        if selector.intervals(state.prompt_len)[0][0] >= stop
        for path in paths
    )
    if parts:
        generated = np.asarray(state.detokenizer.output_token_ids[: max(num_forwarded - state.prompt_len, 0)], np.int64)
        unreached += tuple(
            (path, selector_of(part))
            for part, path in parts
            if not np.logical_and.reduce([each.covers(generated) for each in part]).any()
        )
    if unreached:
        # The samples of a request share their parent, which has to report on all of them.
        vars(state if state.parent_req is None else state.parent_req).setdefault(_BY_SAMPLE, {})[
            state.request_index
        ] = unreached
    listener: Callable[[Any, Unreached], None] | None = getattr(state, _LISTENER, None)
    if listener is not None:
        listener(state, unreached)


def unreached_edits(state: Any) -> tuple[NoEffect, ...]:
    """Return what the finished samples of a sample's request did not reach."""
    by_sample: Mapping[int, Unreached] | None = getattr(
        state if state.parent_req is None else state.parent_req, _BY_SAMPLE, None
    )
    return () if by_sample is None else as_no_effect(by_sample)


def as_no_effect(by_choice: Mapping[int, Iterable[tuple[str, Selector]]]) -> tuple[NoEffect, ...]:
    """Return one entry per path that some choices did not reach."""
    choices: dict[tuple[str, Selector], list[int]] = {}
    for choice in sorted(by_choice):
        for key in by_choice[choice]:
            choices.setdefault(key, []).append(choice)
    return tuple(
        NoEffect(edit=path, reason="unreached", tokens=selector.to_wire(), choices=tuple(numbers))
        for (path, selector), numbers in choices.items()
    )

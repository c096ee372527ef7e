# SPDX-License-Identifier: Apache-2.0
"""Edits, conditions, readouts and stops of a finished sample that no token reached.

All prompt tokens and all generated tokens but the last run through the model; the last as well if its readout has
ended the sample. Whether a selection has one of them follows from its selector and the number of tokens or, for a part
of the output, from the tokens themselves, so the engine reports nothing. Prefix caching does not matter,
because a block is only reused under the same edits; neither do preemption and rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from vllm_steer.program.compiled_part import CompiledPart, selector_of
from vllm_steer.registry.schema import NoEffect
from vllm_steer.request import Selector

Unreached: TypeAlias = tuple[tuple[str, Selector], ...]
"""Path and selector of each selection that a sample did not reach."""


class Selections(NamedTuple):
    """Selectors and parts of a program, with their paths in the request."""

    selectors: tuple[tuple[Selector, tuple[str, ...]], ...] = ()
    """Selectors and their paths; see `Program.selections`."""
    parts: tuple[tuple[tuple[CompiledPart, ...], str], ...] = ()
    """Parts of the output and their paths; see `Program.selected_parts`."""

    def unreached(self, state: Any, num_forwarded: int) -> Unreached:
        """Return what a sample that has finished did not reach.

        Args:
            state: vLLM's state of the sample.
            num_forwarded: Number of its prompt and generated tokens that ran through the model.
        """
        # Without a generated token, no result depends on the edits, however much of the prompt was computed, unless a
        # readout of the prompt has ended the sample.
        stop = num_forwarded if num_forwarded >= state.prompt_len else 0
        unreached = tuple(
            (path, selector)
            for selector, paths in self.selectors
            if selector.intervals(state.prompt_len)[0][0] >= stop
            for path in paths
        )
        if not self.parts:
            return unreached
        generated = np.asarray(state.detokenizer.output_token_ids[: max(num_forwarded - state.prompt_len, 0)], np.int64)
        return unreached + tuple(
            (path, selector_of(part))
            for part, path in self.parts
            if not np.logical_and.reduce([each.covers(generated) for each in part]).any()
        )


NOTHING_SELECTED = Selections()


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

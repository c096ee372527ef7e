# SPDX-License-Identifier: Apache-2.0
"""Random conversations with tool calls, unfinished thinking and markers in contents, and an oracle of their parts.

No engine runs: a conversation is tokens, drawn together with the parts that are open after each of them. The code that
binds a program to a prompt sees the tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vllm_steer.frontend.roles import RoleTokens
from vllm_steer.program.compiled_part import Markers, bound_parts, compile_parts
from vllm_steer.request import Selector
from vllm_steer.request.message_parts import PARTS, ROLES
from vllm_steer.testing.fuzz.workload import Random

HEAD, END, THINK, THOUGHT, CALL, CALLED, SYSTEM, USER, ASSISTANT, TOOL = range(1, 11)
IN_CONTENTS = (THINK, THOUGHT, CALL, CALLED, *range(11, 16))
_ROLES: Mapping[str, int] = dict(zip(ROLES, (SYSTEM, USER, ASSISTANT), strict=True))
TEMPLATE = RoleTokens(
    {role: (HEAD, token) for role, token in _ROLES.items()},
    dict.fromkeys(_ROLES, END),
    frozenset((HEAD,)),
    {},
    frozenset((HEAD, END)),
)
"""A template in which a token begins all messages, the role follows it, and another token ends them."""
MARKERS: Mapping[str, Markers] = {
    "thinking": Markers(THINK, THOUGHT, (END, CALL)),
    "tool_call": Markers(CALL, CALLED, (END,)),
}


class Open(NamedTuple):
    """The spans that are open at a place of a message."""

    thinking: bool = False
    tool_call: bool = False

    def after(self, token: int) -> Open:
        """Return the spans that are open behind a token."""
        changes = {
            END: Open(),
            THINK: self._replace(thinking=True),
            THOUGHT: self._replace(thinking=False),
            CALL: Open(tool_call=True),
            CALLED: self._replace(tool_call=False),
        }
        return changes.get(token, self)

    def parts_of(self, token: int) -> frozenset[str]:
        """Return the parts to which a token here belongs; a marker belongs to the span that it begins or ends."""
        spans = self if token in (THOUGHT, CALLED) else self.after(token)
        return frozenset(name for name, inside in zip(spans._fields, spans, strict=True) if inside) or frozenset(
            ("answer",)
        )


def find_wrong_part(rng: Random) -> str | None:
    """Draw a conversation and what a model might generate; return which part or message is wrong, or None."""
    prompt: list[int] = []
    messages: dict[str, list[tuple[int, int]]] = {role: [] for role in ROLES}
    for _ in range(int(rng.integers(0, 6))):
        role, start = str(rng.choice([*ROLES, "tool"])), len(prompt)
        prompt += [HEAD, _ROLES.get(role, TOOL), *_draw(rng, IN_CONTENTS), END]
        messages.get(role, []).append((start, len(prompt)))
    for role, expected in messages.items():
        if (found := TEMPLATE.spans(role, prompt)) != expected:
            return f"{role} has messages at {found}, expected {expected}, in {prompt}"
    opening, generated = _draw(rng, IN_CONTENTS), _draw(rng, (*IN_CONTENTS, END))
    prompt += [HEAD, ASSISTANT, *opening]
    spans, parts = Open(), []
    for token in opening:
        spans = spans.after(token)
    for token in generated:
        parts.append(spans.parts_of(token))
        spans = spans.after(token)
    for name in PARTS:
        message = prompt[TEMPLATE.open_message(prompt) :]
        bound = bound_parts(compile_parts(Selector(name)), lambda part: MARKERS[part.name], message)
        covered = np.logical_and.reduce([part.covers(np.array(generated, np.int64)) for part in bound])
        wanted = [name in each for each in parts]
        if covered.tolist() != wanted:
            return f"{name} covers {covered.tolist()} of {generated} behind {prompt}, expected {wanted}"
    return None


def _draw(rng: Random, tokens: tuple[int, ...]) -> list[int]:
    return [int(token) for token in rng.choice(tokens, int(rng.integers(0, 9)))]

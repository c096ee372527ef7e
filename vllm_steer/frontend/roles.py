# SPDX-License-Identifier: Apache-2.0
"""Messages of a prompt by role, found by the tokens with which a chat template begins and ends them.

The template is rendered for conversations whose contents differ. A role's header is what all of its messages begin
with, from the special token in front of the role on. A role is refused unless its messages are found exactly in all
of these conversations. The tokens that begin and end messages of any role also tell which message a prompt leaves open.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jinja2 import TemplateError

from vllm_steer.request.message_parts import ROLES
from vllm_steer.request.selector import OPEN_END

_CONVERSATIONS = (("system", "user", "assistant", "user"), ("user", "assistant", "user"))
_CONTENTS = ("alpha {}", "7 {} 7", "\n\nbeta {}\n", " gamma {} ", "'{}'")
"""Contents whose first and last characters merge with different neighbors; ``{}`` is the place of :data:`_MARK`."""
_MARK = "K{}Q"
_CALL = "toolcall0"
"""Id of a tool call; Mistral's have 9 characters."""
_MAX_CHARS = 160
_FAILURES = (TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)
"""Errors of templates that do not accept a conversation."""


@dataclass(frozen=True)
class RoleTokens:
    """Tokens that begin and end the messages of each role."""

    headers: Mapping[str, tuple[int, ...]]
    """First tokens of a message, by role."""
    ends: Mapping[str, int]
    """Last token of a message, by role; missing if a message lasts until the next one."""
    starts: frozenset[int]
    """First tokens of messages; each ends an open message."""
    problems: Mapping[str, str]
    """Reasons why the messages of a role cannot be found, by role."""
    boundaries: frozenset[int] = frozenset()
    """Tokens that begin or end messages, also of roles that cannot be found and of tools, and the end of the text."""
    bounded: frozenset[str] = frozenset()
    """Roles behind whose contents there is a boundary, also at the end of a prompt."""

    def open_message(self, prompt: Sequence[int]) -> int:
        """Return the position of the last boundary of a prompt, from which on its last message is; 0 without any."""
        places = np.flatnonzero(np.isin(np.asarray(prompt), list(self.boundaries)))
        return int(places[-1]) if len(places) else 0

    def spans(self, role: str, prompt: Sequence[int]) -> list[tuple[int, int]]:
        """Return the ranges of the messages of ``role``; the stop of a message that does not end is ``OPEN_END``."""
        marks = [*self.starts, *self.ends.values()]
        found: list[tuple[int, int]] = []
        current, first = "", 0
        for place in np.flatnonzero(np.isin(np.asarray(prompt), marks)).tolist():
            token = prompt[place]
            if token in self.starts:
                if current == role:
                    found.append((first, place))
                headers = self.headers.items()
                current = next((name for name, h in headers if tuple(prompt[place : place + len(h)]) == h), "")
                first = place
            elif current and self.ends.get(current) == token:
                if current == role:
                    found.append((first, place + 1))
                current = ""
        if current == role:
            found.append((first, OPEN_END))
        return found


@dataclass(frozen=True)
class _Rendered:
    """A conversation as tokens, and the range of tokens that has the content of each message."""

    roles: tuple[str, ...]
    ids: tuple[int, ...]
    contents: tuple[tuple[int, int], ...]


def read_role_tokens(tokenizer: Any, template: str | None) -> RoleTokens:
    """Return the tokens of the roles of a chat template, by default of the tokenizer's own."""
    added = frozenset(getattr(tokenizer, "added_tokens_decoder", None) or tokenizer.all_special_ids)
    problems: dict[str, str] = {}
    rendered: list[_Rendered] = []
    generation: tuple[int, ...] = ()
    for roles in _CONVERSATIONS:
        try:
            made, generation = _render_all(tokenizer, template, roles, added)
        except _FAILURES as error:
            problems.update(dict.fromkeys(roles, f"it cannot be rendered as expected: {str(error)[:_MAX_CHARS]}"))
            continue
        rendered += made
        for role in roles:
            problems.pop(role, None)
    after_tool = _find_end_of_tool(tokenizer, template, added)
    behind = [set(each.ids[stop : stop + 1]) for each in rendered for _, stop in each.contents]
    boundaries = frozenset().union(end_of_text(tokenizer), after_tool, *behind)
    bounded = frozenset(("user", "assistant") if behind and all(behind) else ()) | ({"tool"} if after_tool else set())
    if not rendered:
        return RoleTokens({}, {}, frozenset(), MappingProxyType(problems), boundaries, bounded)
    shared = generation[0] if generation and generation[0] in added else None
    found = _find_headers(rendered, generation, shared, added, dict(problems))
    if found.headers.get("system", ()) == found.headers.get("user", (0,)):
        # The template writes system messages as it writes user messages.
        problems["system"] = "they begin as user messages do"
        rendered = [each for each in rendered if "system" not in each.roles]
    found = _find_headers(rendered, generation, shared, added, problems)
    for one, other in itertools.permutations(found.headers, 2):
        if found.headers[other][: len(found.headers[one])] == found.headers[one]:
            problems.update(dict.fromkeys((one, other), f"{one} and {other} begin with the same tokens"))
    for role in found.headers:
        if not all(_is_exact(found, role, each) for each in rendered):
            problems.setdefault(role, "its tokens do not separate the messages")
    return replace(found, boundaries=boundaries | found.starts, bounded=bounded)


def end_of_text(tokenizer: Any) -> frozenset[int]:
    """Return the token with which the tokenizer ends a text, if it has one."""
    end = getattr(tokenizer, "eos_token_id", None)
    return frozenset(() if end is None else (end,))


def read_template(value: str) -> str | None:
    """Return the chat template that a server's flag names: a file or the template itself; None if it is neither."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text()
    except OSError:
        return None


def _render_all(
    tokenizer: Any, template: str | None, roles: tuple[str, ...], added: frozenset[int]
) -> tuple[list[_Rendered], tuple[int, ...]]:
    """Return a conversation with different contents, and the tokens of the template's generation prompt."""
    made = []
    for shift in range(len(_CONTENTS)):
        marks = [_MARK.format(i) for i in range(len(roles))]
        messages: list[dict[str, Any]] = [
            {"role": role, "content": _CONTENTS[(i + shift) % len(_CONTENTS)].format(mark)}
            for i, (role, mark) in enumerate(zip(roles, marks, strict=True))
        ]
        ids, without = (_tokens(tokenizer, template, messages, generates) for generates in (True, False))
        generation = ids[len(without) :] if ids[: len(without)] == without else ()
        made.append(_Rendered(roles, ids, _find_contents(tokenizer, ids, marks, added)))
    return made, generation


def _find_end_of_tool(tokenizer: Any, template: str | None, added: frozenset[int]) -> frozenset[int]:
    """Return the special token behind the result of a tool, as a set; empty if the template has none."""
    content = _MARK.format(0)
    call = {"id": _CALL, "type": "function", "function": {"name": "read", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "alpha"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _CALL, "name": "read", "content": content},
    ]
    try:
        ids = _tokens(tokenizer, template, messages, True)
        ((_, stop),) = _find_contents(tokenizer, ids, [content], added)
    except _FAILURES:
        return frozenset()
    return frozenset(ids[stop : stop + 1])


def _tokens(tokenizer: Any, template: str | None, messages: list[dict[str, Any]], generates: bool) -> tuple[int, ...]:
    if not hasattr(tokenizer, "added_tokens_decoder"):
        # Mistral's tokenizers have no text between messages and tokens, and no generation prompt.
        return tuple(tokenizer.apply_chat_template(copy.deepcopy(messages), add_generation_prompt=True))
    options = {} if template is None else {"chat_template": template}
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generates, **options)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _find_contents(
    tokenizer: Any, ids: tuple[int, ...], marks: list[str], added: frozenset[int]
) -> tuple[tuple[int, int], ...]:
    """Return the range of tokens between special tokens that has each mark.

    Raises:
        ValueError: A mark is missing, or several marks are in one range.
    """
    texts: dict[tuple[int, int], str] = {}
    place = 0
    for special, run in itertools.groupby(ids, added.__contains__):
        stop = place + len(list(run))
        if not special:
            texts[place, stop] = tokenizer.decode(list(ids[place:stop]))
        place = stop
    found = [[each for each, text in texts.items() if mark in text] for mark in marks]
    if any(len(each) != 1 for each in found):
        raise ValueError("the content of a message is not in the prompt once")
    ranges = tuple(each[0] for each in found)
    if len(set(ranges)) != len(ranges):
        raise ValueError("no special tokens are between the contents of messages")
    return ranges


def _find_headers(
    rendered: list[_Rendered],
    generation: tuple[int, ...],
    shared: int | None,
    added: frozenset[int],
    problems: dict[str, str],
) -> RoleTokens:
    """Return the headers and ends of the roles; add the reasons for missing ones to ``problems``."""
    begun: dict[str, list[tuple[int, ...]]] = {role: [] for role in ROLES}
    ended: dict[str, set[int]] = {role: set() for role in ROLES}
    if shared is not None:
        begun["assistant"].append(generation)
    for each in rendered:
        before = 0
        for role, (start, stop) in zip(each.roles, each.contents, strict=True):
            places = [place for place in range(before, start) if each.ids[place] == shared]
            first = max(places, default=start - 1)
            # An empty header if no special token is in front of the content.
            begun[role].append(each.ids[first:stop] if first >= before and each.ids[first] in added else ())
            ended[role].update(each.ids[stop : stop + 1])
            before = stop
    headers = {role: _common_start(each) for role, each in begun.items() if each and role not in problems}
    for role in [role for role, header in headers.items() if not header]:
        problems[role] = "no special token begins its messages"
        del headers[role]
    starts = frozenset(header[0] for header in headers.values())
    ends: dict[str, int] = {}
    for role in headers:
        own = ended[role] - starts
        if len(own) == 1 and len(ended[role]) == 1:
            ends[role] = own.pop()
        elif starts != {shared}:
            # With a shared start token, every message begins with it, whatever its role.
            problems[role] = "no special token ends its messages"
    return RoleTokens(headers, ends, starts, MappingProxyType(problems))


def _common_start(sequences: list[tuple[int, ...]]) -> tuple[int, ...]:
    same = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False))
    return tuple(tokens[0] for tokens in same)


def _is_exact(tokens: RoleTokens, role: str, rendered: _Rendered) -> bool:
    """Return whether exactly the messages of a role are in spans, each in its own, which ends with its end token."""
    spans = tokens.spans(role, rendered.ids)
    counts = [
        (name == role, sum(start < first and last <= stop for start, stop in spans))
        for name, (first, last) in zip(rendered.roles, rendered.contents, strict=True)
    ]
    if role in tokens.ends and any(rendered.ids[stop - 1] != tokens.ends[role] for _, stop in spans if stop < OPEN_END):
        return False  # such as the first token of every prompt
    within = [(start, stop) for start, stop in spans for first, _ in rendered.contents if start < first < stop]
    return all(count == own for own, count in counts) and len(set(within)) == len(within)

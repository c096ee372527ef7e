# SPDX-License-Identifier: Apache-2.0
"""Parts of a conversation that are decided by its tokens.

A span of the output begins with a start token and ends with an end token; both belong to it. Which tokens mark the
named parts depends on the model, so the front end fills them in (:mod:`vllm_steer.frontend.part_markers`). A request
can name tokens itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_SELECTOR_ITEMS
from vllm_steer.request.field_types import Declared, any_of
from vllm_steer.request.scalars import is_integer, read_choice, shown

SpanName = Literal["thinking", "tool_call"]
PartName = Literal["thinking", "answer", "tool_call"]
SPANS: tuple[SpanName, ...] = ("thinking", "tool_call")
RoleName = Literal["system", "user", "assistant"]
PromptPartName = Literal["system", "user", "assistant", "image"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)
IMAGE: Literal["image"] = "image"
PROMPT_PARTS: tuple[PromptPartName, ...] = get_args(PromptPartName)
"""Messages by role, and the placeholder tokens of images; the front end fills in their positions."""
Marker = int | str
"""A token id, or text that is one token."""
MAX_MARKER_CHARS = 64

_Marker = Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_MARKER_CHARS)]
_FROM_FIRST_GENERATED = (
    "Positions and `[start, stop]` pairs that count from 0 at the first generated token: `[[8, null]]` is every token "
    "from the ninth one on."
)
_Pair = Annotated[list[_Marker], msgspec.Meta(min_length=2, max_length=2)]


class GeneratedForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Generated tokens relative to the first one."""

    generated: Annotated[
        list[int | list[int | None]],
        msgspec.Meta(min_length=1, max_length=MAX_SELECTOR_ITEMS, description=_FROM_FIRST_GENERATED),
    ]


class SpanForm(Declared, frozen=True):
    """Generated tokens relative to the first one, or inside or outside of a span between two tokens."""

    generated: Annotated[
        Any,
        any_of(list[int | list[int | None]], None),
        msgspec.Meta(description=_FROM_FIRST_GENERATED),
    ] = None
    between: Annotated[
        Any,
        any_of(SpanName, _Pair, None),
        msgspec.Meta(
            description="Generated tokens from a start token to an end token, both included: a part, or the two "
            "tokens, as ids or as text that is one token."
        ),
    ] = None
    outside: Annotated[
        Any, any_of(SpanName, _Pair, None), msgspec.Meta(description="All other generated tokens; as for `between`.")
    ] = None
    opened: Annotated[
        bool,
        msgspec.Meta(
            description="`between` and `outside`: whether the span has begun if the message that the prompt leaves "
            "open has none of the tokens that begin or end it."
        ),
    ] = False


@dataclass(frozen=True)
class Span:
    """A span of generated tokens, or what lies outside of it."""

    name: str = ""
    """Name of the span, whose tokens the front end fills in; empty if the tokens are given."""
    start: Marker = ""
    end: Marker = ""
    outside: bool = False
    opened: bool = False
    """Whether the span has begun if none of its tokens is in the message that the prompt leaves open."""
    optional: bool = False
    """Whether the span is left out on engines whose model does not have it."""

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form (:class:`SpanForm`)."""
        where = self.name or [self.start, self.end]
        return {"outside" if self.outside else "between": where, **({"opened": True} if self.opened else {})}


PARTS: Mapping[PartName, tuple[Span, ...]] = MappingProxyType(
    {
        "thinking": (Span("thinking"),),
        "answer": (Span("thinking", outside=True), Span("tool_call", outside=True, optional=True)),
        "tool_call": (Span("tool_call"),),
    }
)
"""The spans of which a token of each part is inside or outside."""


def read_span(form: SpanForm, field: str) -> Span:
    """Return the span of ``between`` or ``outside``; raise SteeringError if it is invalid."""
    given = [key for key in ("between", "outside") if getattr(form, key) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise SteeringError(field, f"must have exactly one of the keys generated, between and outside; it has {found}")
    key = given[0]
    span, path, outside = getattr(form, key), f"{field}.{key}", key == "outside"
    if isinstance(span, str):
        return Span(read_choice(span, SPANS, path), outside=outside, opened=form.opened)
    if not isinstance(span, (list, tuple)) or len(span) != 2:
        raise SteeringError(path, f"must be {', '.join(SPANS)}, or a start and an end token, not {shown(span)}")
    start, end = (_read_marker(marker, f"{path}[{i}]") for i, marker in enumerate(span))
    if start == end:
        raise SteeringError(path, f"{shown(start)} cannot both begin and end a span; name two tokens")
    return Span("", start, end, outside, form.opened)


def read_parts(value: object, field: str) -> dict[str, tuple[Marker, ...]]:
    """Return the start and end token of each part, from ``{name: [start, end]}``.

    Raises:
        SteeringError: ``value`` has another form.
    """
    if not isinstance(value, Mapping):
        raise SteeringError(field, f"must be {{name: [start, end]}}, not {shown(value)}")
    read: dict[str, tuple[Marker, ...]] = {}
    for name, pair in value.items():
        read_choice(name, SPANS, field)
        if isinstance(pair, str) or not isinstance(pair, Sequence):
            raise SteeringError(f"{field}.{name}", f"must be a start and an end token, not {shown(pair)}")
        span = read_span(SpanForm(between=list(pair)), f"{field}.{name}")
        read[name] = (span.start, span.end)
    return read


def _read_marker(value: object, field: str) -> Marker:
    if is_integer(value) and 0 <= value < 2**31 - 1:
        return int(value)
    if isinstance(value, str) and 1 <= len(value) <= MAX_MARKER_CHARS:
        return value
    if isinstance(value, (list, tuple)):
        raise SteeringError(field, "has several tokens; a marker is one token, since each token is decided on its own")
    raise SteeringError(field, f"must be a token id, or text that is one token, not {shown(value)}")

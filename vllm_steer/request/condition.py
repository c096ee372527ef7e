# SPDX-License-Identifier: Apache-2.0
"""Conditions on readouts: when an edit applies, and when generation stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_CONDITIONS, MAX_STOP_TOKENS, MAX_STOPS
from vllm_steer.request.part import PartName, PromptPartName, SpanForm
from vllm_steer.request.references import read_name
from vllm_steer.request.scalars import FLOAT32_TINY, did_you_mean, is_integer, read_choice, read_number, shown
from vllm_steer.request.selector import PositionListForm, Selector, SelectorName

WindowName = Literal["token", "previous", "latch", "prompt"]
OverName = Literal["mean", "max", "last", "ema"]
WINDOWS: tuple[WindowName, ...] = get_args(WindowName)
OVERS: tuple[OverName, ...] = get_args(OverName)
_OVERS_OF: Mapping[WindowName, tuple[OverName, ...]] = {"prompt": ("mean", "max", "last"), "previous": OVERS}
STOP_FIELD = "stop_on"
_PARTS_OF_OUTPUT = "thinking, answer, tool_call, or between or outside of two tokens"

_Above = Annotated[float | None, msgspec.Meta(description="The condition holds if the readout is larger.")]
_Below = Annotated[float | None, msgspec.Meta(description="The condition holds if the readout is smaller.")]
_ReadoutName = Annotated[str, msgspec.Meta(description="Name of a probe in `readouts`.")]


class BoundForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One bound on a readout: `above` or `below`."""

    above: _Above = None
    below: _Below = None


class ConditionForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A condition on a readout that switches an edit on."""

    readout: _ReadoutName
    above: _Above = None
    below: _Below = None
    window: Annotated[
        WindowName,
        msgspec.Meta(
            description="The readout that decides about token t: `token`: that of t; `previous`: that of t - 1; "
            "`latch`: whether the condition has held at any token before t, from the last prompt token on; `prompt`: "
            "the prompt's, see `over`."
        ),
    ] = "token"
    over: Annotated[
        OverName | None,
        msgspec.Meta(
            description="`prompt`: mean (default), maximum or last of the readout over the prompt. `previous`: last "
            "(default), mean, maximum or exponential moving average (`ema`, see `alpha`) over the tokens from the last "
            "prompt token to t - 1."
        ),
    ] = None
    alpha: Annotated[
        float | None,
        msgspec.Meta(description="`ema` only: weight of the newest value, between 0 and 1; starts at the first value."),
    ] = None
    tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=MAX_STOP_TOKENS)] | None,
        msgspec.Meta(description="`previous` only: tokens in a row, up to t - 1, at which the condition must hold."),
    ] = None
    positions: Annotated[
        SelectorName | PartName | PromptPartName | PositionListForm | SpanForm | None,
        msgspec.Meta(
            description="`prompt`: one range of prompt tokens; default the whole prompt. `previous` and `latch`: a "
            "part of the output, to whose tokens alone the condition looks; default all."
        ),
    ] = None
    sharpness: Annotated[
        float | None,
        msgspec.Meta(
            description="Scales the edit by sigmoid(sharpness x distance beyond the bound) instead of 0 or 1; not with "
            "`latch`."
        ),
    ] = None
    release: Annotated[
        BoundForm | None, msgspec.Meta(description="`latch` only: bound that switches the edit off again.")
    ] = None


class StopForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A condition on a readout that ends generation."""

    readout: _ReadoutName
    above: _Above = None
    below: _Below = None
    tokens: Annotated[
        int,
        msgspec.Meta(
            ge=1, le=MAX_STOP_TOKENS, description="Generated tokens in a row at which the condition must hold."
        ),
    ] = 1
    positions: Annotated[
        PartName | SpanForm | None,
        msgspec.Meta(description="A part of the output, to whose tokens alone the condition looks; default all."),
    ] = None


ConditionInput: TypeAlias = "Mapping[str, Any] | Condition"
WhenInput: TypeAlias = "ConditionInput | list[ConditionInput] | tuple[ConditionInput, ...] | None"


@dataclass(frozen=True)
class Bound:
    """A bound on a readout."""

    above: bool
    """Whether the readout has to be larger than the threshold, not smaller."""
    threshold: float

    def to_wire(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"above" if self.above else "below": self.threshold}

    def __str__(self) -> str:
        return f"{'above' if self.above else 'below'} {self.threshold:g}"


@dataclass(frozen=True)
class Condition:
    """A checked condition of an edit."""

    readout: str
    bound: Bound
    window: WindowName = "token"
    over: OverName | None = None
    tokens: Selector | None = None
    """Prompt tokens of the window ``prompt``, or the part of the output that another window looks at; None for all."""
    sharpness: float | None = None
    release: Bound | None = None
    alpha: float | None = None
    """Weight of the newest value of an exponential moving average."""
    count: int | None = None
    """Tokens in a row at which the condition must hold; None to fold with ``over``."""

    @classmethod
    def parse(cls, value: object, field: str) -> Condition:
        """Return the condition that a mapping of :class:`ConditionForm`'s fields describes.

        Raises:
            SteeringError: A key is unknown or a value is invalid.
        """
        if isinstance(value, Condition):
            return value
        given = _read_mapping(value, ConditionForm, field)
        window = read_choice(given.get("window", "token"), WINDOWS, f"{field}.window")
        over = given.get("over")
        if over is not None:
            if window not in _OVERS_OF:
                raise SteeringError(
                    f"{field}.over", f'needs the window "prompt" or "previous", not "{window}"; omit it'
                )
            over = read_choice(over, _OVERS_OF[window], f"{field}.over")
        for name, owner in (("release", "latch"), ("tokens", "previous")):
            if given.get(name) is not None and window != owner:
                raise SteeringError(f"{field}.{name}", f'needs the window "{owner}", not "{window}"; omit it')
        sharpness = given.get("sharpness")
        if sharpness is not None:
            if window == "latch":
                raise SteeringError(f"{field}.sharpness", "a latch is on or off; omit sharpness or use another window")
            sharpness = read_number(sharpness, f"{field}.sharpness")
            # A smaller number is 0 in float32, which means a step instead of a sigmoid.
            if sharpness < FLOAT32_TINY:
                raise SteeringError(
                    f"{field}.sharpness", f"must be at least {FLOAT32_TINY:.3g} (float32), not {shown(sharpness)}"
                )
        alpha, count = given.get("alpha"), given.get("tokens")
        if alpha is None and over == "ema":
            raise SteeringError(f"{field}.alpha", "is missing; ema needs the weight of the newest value, such as 0.2")
        if alpha is not None and over != "ema":
            raise SteeringError(f"{field}.alpha", 'has a meaning with over="ema" only; omit it')
        if alpha is not None:
            alpha = read_number(alpha, f"{field}.alpha")
            if not 0 < alpha < 1:
                raise SteeringError(f"{field}.alpha", f"must be between 0 and 1, not {shown(alpha)}")
        if count is not None:
            if not is_integer(count) or not 1 <= count <= MAX_STOP_TOKENS:
                raise SteeringError(f"{field}.tokens", f"must be 1 to {MAX_STOP_TOKENS}, not {shown(count)}")
            for name in ("over", "sharpness"):
                if given.get(name) is not None:
                    raise SteeringError(f"{field}.{name}", "cannot be combined with tokens; omit one of them")
        positions = None if given.get("positions") is None else _read_positions(given, window, over, field)
        release = given.get("release")
        if release is not None:
            release = _read_bound(_read_mapping(release, BoundForm, f"{field}.release"), f"{field}.release")
        return cls(
            read_name(given["readout"], f"{field}.readout"),
            _read_bound(given, field),
            window,
            over or ("mean" if window == "prompt" else None),
            positions,
            sharpness,
            release,
            alpha,
            None if count is None else int(count),
        )

    def to_wire(self) -> dict[str, object]:
        """Return the JSON form (:class:`ConditionForm`)."""
        wire: dict[str, object] = {"readout": self.readout, **self.bound.to_wire(), "window": self.window}
        others = {
            "over": self.over,
            "positions": None if self.tokens is None else self.tokens.to_wire(),
            "sharpness": self.sharpness,
            "alpha": self.alpha,
            "tokens": self.count,
            "release": None if self.release is None else self.release.to_wire(),
        }
        return wire | {name: each for name, each in others.items() if each is not None}


@dataclass(frozen=True)
class Stop:
    """A checked condition that ends generation."""

    readout: str
    bound: Bound
    tokens: int = 1
    part: Selector | None = None
    """The part of the output that the condition looks at; None for all generated tokens."""


def read_when(value: object, field: str = "when") -> tuple[Condition, ...]:
    """Parse the conditions of an edit: None, one condition or a list, all of which must hold.

    Raises:
        SteeringError: ``value`` has another form.
    """
    if value is None or (isinstance(value, tuple) and not value):
        return ()
    if not isinstance(value, (list, tuple)):
        return (Condition.parse(value, field),)
    if not 1 <= len(value) <= MAX_CONDITIONS:
        raise SteeringError(field, f"has {len(value)} conditions; give 1 to {MAX_CONDITIONS}, or omit it")
    return tuple(Condition.parse(each, f"{field}[{i}]") for i, each in enumerate(value))


def parse_stops(value: object) -> tuple[Stop, ...]:
    """Parse the ``stop_on`` field: a list of conditions, any of which ends generation, or None.

    Raises:
        SteeringError: ``value`` has another form.
    """
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise SteeringError(
            STOP_FIELD, f'must be a list such as [{{"readout": "refusal", "above": 0.9}}], not {shown(value)}'
        )
    if not 1 <= len(value) <= MAX_STOPS:
        raise SteeringError(STOP_FIELD, f"has {len(value)} conditions; give 1 to {MAX_STOPS}, or omit it")
    return tuple(_read_stop(each, stop_source(i)) for i, each in enumerate(value))


def condition_source(edit_path: str, index: int, count: int) -> str:
    """Return the path of one of the ``count`` conditions of an edit."""
    return f"{edit_path}.when" if count == 1 else f"{edit_path}.when[{index}]"


def stop_source(index: int) -> str:
    """Return the path of a stop."""
    return f"{STOP_FIELD}[{index}]"


def _read_stop(value: object, field: str) -> Stop:
    given = _read_mapping(value, StopForm, field)
    tokens = given.get("tokens", 1)
    if not is_integer(tokens) or not 1 <= tokens <= MAX_STOP_TOKENS:
        raise SteeringError(f"{field}.tokens", f"must be 1 to {MAX_STOP_TOKENS}, not {shown(tokens)}")
    part = None
    if given.get("positions") is not None:
        part = Selector.parse(given["positions"], f"{field}.positions")
        if not part.spans:
            raise SteeringError(f"{field}.positions", f"must be a part of the output: {_PARTS_OF_OUTPUT}")
    return Stop(read_name(given["readout"], f"{field}.readout"), _read_bound(given, field), int(tokens), part)


def _read_positions(given: Mapping[str, Any], window: WindowName, over: OverName | None, field: str) -> Selector:
    """Return the tokens that a condition looks at."""
    path = f"{field}.positions"
    selector = Selector.parse(given["positions"], path)
    if window == "prompt":
        if selector.spans:
            raise SteeringError(
                path, 'is a part of the output, but the window is the prompt; use the window "previous" or "latch"'
            )
    elif window == "token":
        raise SteeringError(
            path,
            'does not apply to the window "token" (the default); set another window, or the edit\'s tokens',
        )
    elif not selector.spans:
        raise SteeringError(
            path, f'must be a part of the output: {_PARTS_OF_OUTPUT}. Positions need the window "prompt"'
        )
    elif over == "mean":
        raise SteeringError(path, 'cannot be combined with over="mean"; use over="last", "max" or "ema", or tokens')
    return selector


def _read_mapping(value: object, form: Any, field: str) -> Mapping[str, Any]:
    names = form.__struct_fields__
    if not isinstance(value, Mapping):
        raise SteeringError(field, f"must be a dict with {', '.join(names)}, not {shown(value)}")
    unknown = [key for key in value if key not in names]
    if unknown:
        similar = did_you_mean(unknown[0], names)
        raise SteeringError(field, f"unknown key {shown(unknown[0])}; use {', '.join(names)}{similar}")
    if "readout" in names and "readout" not in value:
        raise SteeringError(f"{field}.readout", "is missing; name a probe of the request's field readouts")
    return value


def _read_bound(given: Mapping[str, Any], field: str) -> Bound:
    bounds = [name for name in ("above", "below") if given.get(name) is not None]
    if not bounds:
        raise SteeringError(f"{field}.above", "is missing; give above or below")
    if len(bounds) > 1:
        raise SteeringError(f"{field}.above", "cannot be combined with below; omit one of them")
    return Bound(bounds[0] == "above", read_number(given[bounds[0]], f"{field}.{bounds[0]}"))

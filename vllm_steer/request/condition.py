# SPDX-License-Identifier: Apache-2.0
"""Conditions on readouts: when an edit applies, and when generation stops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_CONDITIONS, MAX_STOP_TOKENS, MAX_STOPS
from vllm_steer.request.field_types import Declared, Number, any_of, read
from vllm_steer.request.message_parts import PartName, PromptPartName, SpanForm
from vllm_steer.request.references import read_name
from vllm_steer.request.scalars import FLOAT32_TINY, read_choice, shown
from vllm_steer.request.selector import PositionListForm, Selector, SelectorName

WindowName = Literal["token", "previous", "latch", "prompt"]
OverName = Literal["mean", "max", "last", "ema"]
OVERS: tuple[OverName, ...] = get_args(OverName)
_OVERS_OF: Mapping[WindowName, tuple[OverName, ...]] = {"prompt": ("mean", "max", "last"), "previous": OVERS}
STOP_FIELD = "stop_on"
_PARTS_OF_OUTPUT = "thinking, answer, tool_call, or between or outside of two tokens"

_MISSING = {"missing": "; name a probe of the request's field readouts"}
_ReadoutName = Annotated[str, msgspec.Meta(description="Name of a probe in `readouts`.", extra=_MISSING)]
_Above = Annotated[Number | None, msgspec.Meta(description="The condition holds if the readout is larger.")]
_Below = Annotated[Number | None, msgspec.Meta(description="The condition holds if the readout is smaller.")]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_STOP_TOKENS)]


class Bound(Declared, frozen=True):
    """One bound on a readout: `above` or `below`."""

    above: _Above = None
    below: _Below = None

    def __post_init__(self) -> None:
        if self.above is None and self.below is None:
            raise SteeringError("above", "is missing; give above or below")
        if self.above is not None and self.below is not None:
            raise SteeringError("above", "cannot be combined with below; omit one of them")


class _OnReadout(Declared, frozen=True):
    """A condition on a readout."""

    readout: _ReadoutName
    above: _Above = None
    below: _Below = None

    def __post_init__(self) -> None:
        read_name(self.readout, "readout")
        self.bound  # noqa: B018 checks above and below

    @property
    def bound(self) -> Bound:
        """The bound on the readout."""
        return Bound(above=self.above, below=self.below)


class Condition(_OnReadout, frozen=True):
    """A condition on a readout that switches an edit on."""

    window: Annotated[
        WindowName,
        msgspec.Meta(
            description="The readout that decides about token t: `token`: that of t; `previous`: that of t - 1; "
            "`latch`: whether the condition has held at any token before t, from the last prompt token on; `prompt`: "
            "the prompt's, see `over`."
        ),
    ] = "token"
    over: Annotated[
        str | None,
        any_of(OverName, None),
        msgspec.Meta(
            description="`prompt`: mean (default), maximum or last of the readout over the prompt. `previous`: last "
            "(default), mean, maximum or exponential moving average (`ema`, see `alpha`) over the tokens from the last "
            "prompt token to t - 1."
        ),
    ] = None
    alpha: Annotated[
        Number | None,
        msgspec.Meta(description="`ema` only: weight of the newest value, between 0 and 1; starts at the first value."),
    ] = None
    tokens: Annotated[
        _Count | None,
        msgspec.Meta(description="`previous` only: tokens in a row, up to t - 1, at which the condition must hold."),
    ] = None
    positions: Annotated[
        Selector | None,
        any_of(SelectorName, PartName, PromptPartName, PositionListForm, SpanForm, None),
        msgspec.Meta(
            description="`prompt`: one range of prompt tokens; default the whole prompt. `previous` and `latch`: a "
            "part of the output, to whose tokens alone the condition looks; default all."
        ),
    ] = None
    sharpness: Annotated[
        Number | None,
        msgspec.Meta(
            description="Scales the edit by sigmoid(sharpness x distance beyond the bound) instead of 0 or 1; not with "
            "`latch`."
        ),
    ] = None
    release: Annotated[
        Bound | None, msgspec.Meta(description="`latch` only: bound that switches the edit off again.")
    ] = None

    def __post_init__(self) -> None:
        """Check the rules between the fields, and fill in ``over`` of the prompt."""
        super().__post_init__()
        window, over = self.window, self.over
        if over is not None and window not in _OVERS_OF:
            raise SteeringError("over", f'needs the window "prompt" or "previous", not "{window}"; omit it')
        if over is not None:
            read_choice(over, _OVERS_OF[window], "over")
        for name, value, owner in (("release", self.release, "latch"), ("tokens", self.tokens, "previous")):
            if value is not None and window != owner:
                raise SteeringError(name, f'needs the window "{owner}", not "{window}"; omit it')
        if self.sharpness is not None and window == "latch":
            raise SteeringError("sharpness", "a latch is on or off; omit sharpness or use another window")
        # A smaller number is 0 in float32, which means a step instead of a sigmoid.
        if self.sharpness is not None and self.sharpness < FLOAT32_TINY:
            raise SteeringError(
                "sharpness", f"must be at least {FLOAT32_TINY:.3g} (float32), not {shown(self.sharpness)}"
            )
        if self.alpha is None and over == "ema":
            raise SteeringError("alpha", "is missing; ema needs the weight of the newest value, such as 0.2")
        if self.alpha is not None and over != "ema":
            raise SteeringError("alpha", 'has a meaning with over="ema" only; omit it')
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise SteeringError("alpha", f"must be between 0 and 1, not {shown(self.alpha)}")
        for name in ("over", "sharpness"):
            if getattr(self, name) is not None and self.tokens is not None:
                raise SteeringError(name, "cannot be combined with tokens; omit one of them")
        if self.positions is not None:
            self._check_positions(self.positions)
        if window == "prompt" and over is None:
            msgspec.structs.force_setattr(self, "over", "mean")

    def _check_positions(self, positions: Selector) -> None:
        if self.window == "token":
            problem = 'does not apply to the window "token" (the default); set another window, or the edit\'s tokens'
        elif self.window == "prompt" and positions.spans:
            problem = 'is a part of the output, but the window is the prompt; use the window "previous" or "latch"'
        elif self.window != "prompt" and not positions.spans:
            problem = f'must be a part of the output: {_PARTS_OF_OUTPUT}. Positions need the window "prompt"'
        elif self.window != "prompt" and self.over == "mean":
            problem = 'cannot be combined with over="mean"; use over="last", "max" or "ema", or tokens'
        else:
            return
        raise SteeringError("positions", problem)


class Stop(_OnReadout, frozen=True):
    """A condition on a readout that ends generation."""

    tokens: Annotated[
        _Count, msgspec.Meta(description="Generated tokens in a row at which the condition must hold.")
    ] = 1
    positions: Annotated[
        Selector | None,
        any_of(PartName, SpanForm, None),
        msgspec.Meta(description="A part of the output, to whose tokens alone the condition looks; default all."),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions is not None and not self.positions.spans:
            raise SteeringError("positions", f"must be a part of the output: {_PARTS_OF_OUTPUT}")


ConditionInput: TypeAlias = "Mapping[str, Any] | Condition"
WhenInput: TypeAlias = "ConditionInput | list[ConditionInput] | tuple[ConditionInput, ...] | None"


def read_when(value: object, field: str = "when") -> tuple[Condition, ...]:
    """Parse the conditions of an edit: None, one condition or a list, all of which must hold.

    Raises:
        SteeringError: ``value`` has another form.
    """
    if value is None or (isinstance(value, tuple) and not value):
        return ()
    if not isinstance(value, (list, tuple)):
        return (read(Condition, value, field),)
    if not 1 <= len(value) <= MAX_CONDITIONS:
        raise SteeringError(field, f"has {len(value)} conditions; give 1 to {MAX_CONDITIONS}, or omit it")
    return tuple(read(Condition, each, f"{field}[{i}]") for i, each in enumerate(value))


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
    return tuple(read(Stop, each, stop_source(i)) for i, each in enumerate(value))


def condition_source(edit_path: str, index: int, count: int) -> str:
    """Return the path of one of the ``count`` conditions of an edit."""
    return f"{edit_path}.when" if count == 1 else f"{edit_path}.when[{index}]"


def stop_source(index: int) -> str:
    """Return the path of a stop."""
    return f"{STOP_FIELD}[{index}]"

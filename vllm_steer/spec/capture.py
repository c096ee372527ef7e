# SPDX-License-Identifier: Apache-2.0
"""What a request wants read: which sites, at which positions, in which form, for which consumer."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_CONSUMERS, MAX_OPTIONS_CHARS, MAX_OPTIONS_DEPTH
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.spec.edit import Layers, LayersInput, read_layers
from vllm_steer.spec.projection import DirectionsInput, NamedProjection, Projection
from vllm_steer.spec.scalars import is_integer, read_choice, shown
from vllm_steer.spec.selector import Selector, SelectorName, TokensInput

PositionsName = Literal["last_prompt", "all_prompt", "all_generated", "all"]
DtypeName = Literal["float32", "float16", "bfloat16"]
ReduceName = Literal["mean", "last"]
Hooks: TypeAlias = tuple[tuple[PointName, Layers], ...]
PositionsInput: TypeAlias = PositionsName | TokensInput
Reduce: TypeAlias = ReduceName | Projection | NamedProjection | None
ReduceInput: TypeAlias = (
    ReduceName | Projection | NamedProjection | Mapping[Literal["directions", "probes"], DirectionsInput] | None
)

# What users write for `positions` -> the selector it is.
POSITIONS: Mapping[PositionsName, SelectorName] = MappingProxyType(
    {"last_prompt": "last_prompt", "all_prompt": "prompt", "all_generated": "generated", "all": "all"}
)
DTYPES: tuple[DtypeName, ...] = ("float32", "float16", "bfloat16")
REDUCTIONS: tuple[ReduceName, ...] = ("mean", "last")
SPEC_KEYS = ("hooks", "positions", "before", "dtype", "reduce")


_CONSUMER_NAME = re.compile("[a-z][a-z0-9_-]{0,63}")
_NO_OPTIONS = "{}"
_OPTION_NAME = re.compile("[A-Za-z_][A-Za-z0-9_-]{0,63}")
_EXAMPLE = '{"memory": {"hooks": {"post_block": [12]}, "positions": "last_prompt"}}'


@dataclass(frozen=True, init=False, repr=False, eq=False)
class CaptureSpec:
    """Which rows of the residual stream one consumer gets of a request; checked when made, and immutable.

    Every argument is by keyword. Equality and hash are by content.
    """

    hooks: Hooks
    """Points in order of computation, each with ascending layer numbers or ``"all"``."""
    tokens: Selector
    """Which tokens of the request."""
    before: bool
    """Whether rows are read ahead of their point's own edits."""
    dtype: DtypeName | None
    """What rows are converted to; None for the model's own."""
    reduce: Reduce
    """None: n rows ``[n, H]``. ``"mean"``, ``"last"``: ``[1, H]``. A projection on k directions: ``[n, k]``."""
    _options: str
    # Options as canonical JSON: immutable, comparable, hashable, and safe to send.

    def __init__(
        self,
        *,
        hooks: Mapping[PointName, LayersInput],
        positions: PositionsInput = "last_prompt",
        before: bool = False,
        dtype: DtypeName | None = None,
        reduce: ReduceInput = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Check and keep the arguments.

        Args:
            hooks: ``{point: layers}``, layers being one number, a list, tuple or range of them, or ``"all"``.
            positions: ``"last_prompt"``, ``"all_prompt"``, ``"all_generated"``, ``"all"``, or positions as
                `Selector` takes them: a range, or a list of positions and ``[start, stop)`` pairs, negative ones
                counting back from the end of the prompt.
            before: read ahead of the point's own edits; the default reads what they leave.
            dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, or None for the model's.
            reduce: ``"mean"`` or ``"last"`` of the rows of a site, or a `Projection`, also written
                ``{"directions": ...}``, or ``{"probes": ["calm/anger", ...]}``, directions of registered modules.
            options: what the consumer takes beside all this, in JSON's types.

        Raises:
            SteeringError: a value is wrong; its ``field`` is the argument's name, with a path below it if any.
        """
        checked = {
            "hooks": _read_hooks(hooks),
            "tokens": _read_positions(positions),
            "before": _read_flag(before, "before"),
            "dtype": None if dtype is None else read_choice(dtype, DTYPES, "dtype"),
            "reduce": _read_reduce(reduce),
            "_options": _read_options(options),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def options(self) -> dict[str, Any]:
        """The consumer's own options; a new dict each time."""
        options: dict[str, Any] = json.loads(self._options) if self._options != _NO_OPTIONS else {}
        return options

    def with_reduce(self, reduce: Reduce) -> "CaptureSpec":
        """The same spec with another reduction."""
        return CaptureSpec(
            hooks=dict(self.hooks),
            positions=self.tokens,
            before=self.before,
            dtype=self.dtype,
            reduce=reduce,
            options=self.options,
        )

    def to_wire(self) -> dict[str, object]:
        """The spec in builtins that msgpack can carry (a projection's data are bytes); `from_wire` is the inverse."""
        return {
            "hooks": [[point, layers if layers == "all" else list(layers)] for point, layers in self.hooks],
            "tokens": self.tokens.to_wire(),
            "before": self.before,
            "dtype": self.dtype,
            "reduce": self.reduce.to_wire() if isinstance(self.reduce, (Projection, NamedProjection)) else self.reduce,
            "options": self._options,
        }

    @classmethod
    def from_wire(cls, obj: object) -> "CaptureSpec":
        """Inverse of `to_wire`; raises SteeringError on what it did not write."""
        if not isinstance(obj, Mapping) or set(obj) != {"hooks", "tokens", "before", "dtype", "reduce", "options"}:
            raise SteeringError("capture", "is not a spec in wire form")
        try:
            hooks, options, reduce = dict(obj["hooks"]), json.loads(obj["options"]), obj["reduce"]
        except (TypeError, ValueError) as error:
            raise SteeringError("capture", f"is not a spec in wire form: {shown(str(error))}") from None
        return cls(
            hooks=hooks,
            positions=Selector.from_wire(obj["tokens"]),
            before=obj["before"],
            dtype=obj["dtype"],
            reduce=Projection.from_wire(reduce) if isinstance(reduce, Mapping) and "probes" not in reduce else reduce,
            options=options,
        )

    def _content(self) -> tuple[object, ...]:
        return self.hooks, self.tokens, self.before, self.dtype, self.reduce, self._options

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, CaptureSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __repr__(self) -> str:
        shown_values = {
            "hooks": dict(self.hooks),
            "positions": self.tokens.to_wire(),
            "before": self.before,
            "dtype": self.dtype,
            "reduce": self.reduce,
            "options": self.options,
        }
        return f"CaptureSpec({', '.join(f'{name}={value!r}' for name, value in shown_values.items() if value)})"

    def __deepcopy__(self, memo: object) -> "CaptureSpec":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(CaptureSpec.from_wire, self.to_wire()), ()


def parse_capture(value: object, field: str = "capture") -> tuple[tuple[str, CaptureSpec], ...]:
    """Read the ``capture`` field of one request.

    Args:
        value: ``{consumer: spec}``, a spec being a `CaptureSpec` or a dict of its arguments, in which every other key
            is one of the consumer's options; or None.
        field: where the value stands, for the error.

    Returns:
        Name and spec of each consumer, in the order given; empty for None.

    Raises:
        SteeringError: ``value`` is anything else; its ``field`` is the path of the offending value. Whether a
            consumer of that name exists, and takes these options, is for others to check.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise SteeringError(
            field, f"must be {{consumer: spec}}, e.g. {_EXAMPLE}, not {shown(value)} ({type(value).__name__})"
        )
    if not value:
        raise SteeringError(field, "is empty; name a consumer, or leave it out")
    if len(value) > MAX_CONSUMERS:
        raise SteeringError(field, f"names {len(value)} consumers; a request may have {MAX_CONSUMERS}")
    parsed: dict[str, CaptureSpec] = {}
    for key, spec in value.items():
        name = _read_consumer_name(key, field)
        parsed[name] = spec if isinstance(spec, CaptureSpec) else _spec_of_dict(spec, f"{field}.{name}")
    return tuple(parsed.items())


def _read_consumer_name(key: object, field: str) -> str:
    if not isinstance(key, str) or not _CONSUMER_NAME.fullmatch(key):
        raise SteeringError(
            field,
            f"{shown(key)} is no name of a consumer: lower-case letters, digits, - and _, beginning with a letter",
        )
    return str(key)


def _spec_of_dict(spec: object, path: str) -> CaptureSpec:
    if not isinstance(spec, Mapping):
        raise SteeringError(
            path, f'must be a spec, e.g. {{"hooks": {{"post_block": [12]}}}}, not {shown(spec)} ({type(spec).__name__})'
        )
    if "hooks" not in spec:
        hint = next((f"; {shown(key)} goes into hooks" for key in spec if key in POINT_NAMES), "")
        raise SteeringError(f"{path}.hooks", f'is missing; name the sites, e.g. {{"post_block": [12]}}{hint}')
    if "tokens" in spec:
        raise SteeringError(f"{path}.tokens", "is called positions in a capture")
    given: dict[str, Any] = {name: spec[name] for name in SPEC_KEYS if name in spec}
    options = {name: value for name, value in spec.items() if name not in SPEC_KEYS}
    try:
        return CaptureSpec(**given, options=options)
    except SteeringError as error:
        # An option stands beside the spec's own keys where the spec is a dict.
        raise SteeringError(f"{path}.{error.field.removeprefix('options.')}", error.problem) from None


def _read_hooks(value: object) -> Hooks:
    if not isinstance(value, Mapping):
        raise SteeringError("hooks", f'must be {{point: layers or "all"}}, not {shown(value)} ({type(value).__name__})')
    if not value:
        raise SteeringError("hooks", f"is empty; name a point, one of {', '.join(POINT_NAMES)}")
    by_point: dict[PointName, Layers] = {}
    for key, layers in value.items():
        point = read_choice(key, POINT_NAMES, "hooks")
        by_point[point] = read_layers(layers, f"hooks.{point}")
    return tuple((point, by_point[point]) for point in POINT_NAMES if point in by_point)


def _read_positions(value: object) -> Selector:
    if isinstance(value, str):
        return Selector(POSITIONS[read_choice(value, POSITIONS, "positions")])
    if not isinstance(value, (list, tuple, range, Selector)):
        raise SteeringError(
            "positions",
            f"must be {', '.join(POSITIONS)}, a range, or a list of positions and [start, stop] pairs, "
            f"not {shown(value)} ({type(value).__name__})",
        )
    return Selector.parse(value, "positions")


def _read_flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise SteeringError(field, f"must be true or false, not {shown(value)} ({type(value).__name__})")
    return value


def _read_reduce(value: object) -> Reduce:
    if value is None or isinstance(value, (Projection, NamedProjection)):
        return value
    if isinstance(value, str):
        return read_choice(value, REDUCTIONS, "reduce")
    if isinstance(value, Mapping) and set(value) == {"directions"}:
        return Projection(value["directions"], "reduce.directions")
    if isinstance(value, Mapping) and set(value) == {"probes"}:
        return NamedProjection.parse(value["probes"], "reduce.probes")
    raise SteeringError(
        "reduce",
        f'must be {", ".join(REDUCTIONS)}, {{"directions": [[...], ...]}} or {{"probes": ["module/probe", ...]}}, '
        f"not {shown(value)}",
    )


def _read_options(value: object) -> str:
    if value is None:
        return _NO_OPTIONS
    if not isinstance(value, Mapping):
        raise SteeringError("options", f"must be a dict, not {shown(value)} ({type(value).__name__})")
    for name in value:
        if not isinstance(name, str) or not _OPTION_NAME.fullmatch(name):
            raise SteeringError("options", f"{shown(name)} is no name of an option; use letters, digits, - and _")
    plain = {str(name): _plain(item, f"options.{name}", MAX_OPTIONS_DEPTH) for name, item in value.items()}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_OPTIONS_CHARS:
        raise SteeringError("options", f"take {len(text)} characters of JSON; {MAX_OPTIONS_CHARS} is the most")
    return text


def _plain(value: object, field: str, depth: int) -> Any:
    """``value`` in new builtins of JSON; `json.dumps` would take more, and turn other keys into strings."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth and isinstance(value, (list, tuple)):
        return [_plain(item, f"{field}[{i}]", depth - 1) for i, item in enumerate(value)]
    if depth and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{field}.{shown(key)}", depth - 1) for key, item in value.items()}
    if is_integer(value) or isinstance(value, float):
        raise SteeringError(field, f"must be finite, and 64 bits if an integer, not {shown(value)}")
    raise SteeringError(
        field,
        f"must be of JSON's types, {MAX_OPTIONS_DEPTH} deep at most, not {shown(value)} ({type(value).__name__})",
    )

# SPDX-License-Identifier: Apache-2.0
"""Capture specs: the rows that a request captures, and the consumers that receive them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_CONSUMERS, MAX_LAYERS
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.request.arguments import suggest_arguments
from vllm_steer.request.capture_form import (
    ARGUMENT_ALIASES,
    DTYPE_ALIASES,
    DTYPES,
    REDUCTIONS,
    SPEC_KEYS,
    DtypeName,
    ReduceName,
)
from vllm_steer.request.consumer_options import NO_OPTIONS, read_options
from vllm_steer.request.part import PARTS, PROMPT_PARTS, PromptPartName, SpanForm
from vllm_steer.request.projection import DirectionsInput, NamedProjection, Projection
from vllm_steer.request.scalars import read_choice, shown
from vllm_steer.request.selector import (
    POSITION_ALIASES,
    POSITIONS,
    PositionsName,
    Selector,
    TokensInput,
    selector_form_error,
)
from vllm_steer.request.sites import Layers, LayersInput, read_layers, read_point, read_site

Hooks: TypeAlias = tuple[tuple[PointName, Layers], ...]
HooksInput: TypeAlias = "Mapping[PointName, LayersInput] | Mapping[str, LayersInput] | Sequence[str]"
PositionsInput: TypeAlias = PositionsName | TokensInput
Reduce: TypeAlias = ReduceName | Projection | NamedProjection | None
ReduceInput: TypeAlias = (
    ReduceName | Projection | NamedProjection | Mapping[Literal["directions", "probes"], DirectionsInput] | None
)

_NAMES: tuple[PositionsName | PromptPartName, ...] = (*POSITIONS, *PROMPT_PARTS)
"""Names of `positions`."""
_CONSUMER_NAME = re.compile("[a-z][a-z0-9_-]{0,63}")
_HOOKS_FORM = '{point: layers or "all"} such as {"post_block": [12]}, or a list of sites such as ["resid_post.12"]'
_EXAMPLE = '{"memory": {"hooks": {"post_block": [12]}, "positions": "last_prompt"}}'


@dataclass(frozen=True, init=False, repr=False, eq=False)
class CaptureSpec:
    """Rows of the residual stream that one consumer receives, validated on construction and immutable.

    All arguments are keyword-only. Equality and hash are by content. `CaptureForm` declares the JSON form.

    Examples:
        >>> from vllm_steer import CaptureSpec
        >>> CaptureSpec(hooks={"post_block": range(2)}, positions="all").hooks
        (('post_block', (0, 1)),)
    """

    hooks: Hooks
    """Points in order of computation, each with ascending layer numbers or ``"all"``."""
    tokens: Selector
    """The tokens to capture (argument ``positions``)."""
    before: bool
    """Whether rows are captured before the edits of their point apply."""
    dtype: DtypeName | None
    """Type that rows are converted to; None for the model's own."""
    reduce: Reduce
    """None: n rows ``[n, H]``. ``"mean"``, ``"last"``: ``[1, H]``. A projection on k directions: ``[n, k]``."""
    _options: str
    # Options as canonical JSON: immutable, comparable and hashable.

    @suggest_arguments(ARGUMENT_ALIASES)
    def __init__(
        self,
        *,
        hooks: HooksInput,
        positions: PositionsInput = "last_prompt",
        before: bool = False,
        dtype: DtypeName | None = None,
        reduce: ReduceInput = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Validate the arguments.

        Args:
            hooks: ``{point: layers}``; layers are one number; a list, tuple, range,
                numpy array or torch tensor of numbers; or ``"all"``. Or a list of names of sites in other libraries,
                such as ``["blocks.3.hook_resid_post"]`` (docs/reference/points.md).
            positions: ``"last_prompt"``, ``"all_prompt"``, ``"all_generated"``, ``"all"``; ``"system"``, ``"user"``,
                ``"assistant"`` or ``"image"``, the messages of a role or the images of the prompt; or positions in a
                form that `Selector` accepts: a range, a list of positions and ``[start, stop)`` pairs, or such a list
                that counts from the first generated token, ``{"generated": [[8, None]]}``. Negative positions count
                back from the end of the prompt.
            before: Capture before the edits of the same point apply. By default rows include these edits.
            dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, or None for the model's own.
            reduce: ``"mean"`` or ``"last"`` of the rows of a site; a `Projection`, also written
                ``{"directions": ...}``; or ``{"probes": ["calm/anger", ...]}`` for probes of registered modules.
            options: Options of the consumer, in JSON types.

        Raises:
            SteeringError: A value is invalid; its ``field`` is the argument's name, with a path below it if any.
        """
        checked = {
            "hooks": _read_hooks(hooks),
            "tokens": _read_positions(positions),
            "before": _read_flag(before, "before"),
            "dtype": None if dtype is None else read_choice(dtype, DTYPES, "dtype", aliases=DTYPE_ALIASES),
            "reduce": _read_reduce(reduce),
            "_options": read_options(options),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def positions(self) -> Selector:
        """The tokens to capture; equal to `tokens`."""
        return self.tokens

    @property
    def options(self) -> dict[str, Any]:
        """A new dict of the consumer's options."""
        options: dict[str, Any] = json.loads(self._options) if self._options != NO_OPTIONS else {}
        return options

    def with_changes(self, **changes: Any) -> "CaptureSpec":
        """Return the spec with other values of some arguments."""
        fields = {"positions": self.tokens, "before": self.before, "dtype": self.dtype, "reduce": self.reduce}
        return CaptureSpec(**{"hooks": dict(self.hooks), "options": self.options, **fields, **changes})

    def to_wire(self) -> dict[str, object]:
        """Return the spec as builtins for msgpack; `from_wire` is the inverse."""
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
        """Decode the result of `to_wire`; raise SteeringError on anything else."""
        if not isinstance(obj, Mapping) or set(obj) != {"hooks", "tokens", "before", "dtype", "reduce", "options"}:
            raise SteeringError("capture", "is not an encoded capture spec")
        try:
            hooks, options, reduce = dict(obj["hooks"]), json.loads(obj["options"]), obj["reduce"]
        except (TypeError, ValueError) as error:
            raise SteeringError("capture", f"is not an encoded capture spec: {shown(str(error))}") from None
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
    """Parse the ``capture`` field of a request.

    Whether a consumer exists and accepts its options is checked later.

    Args:
        value: ``{consumer: spec}`` or None. A spec is a `CaptureSpec` or a dict of its arguments, in which all other
            keys are options of the consumer.
        field: Path of the value, for errors.

    Returns:
        Name and spec of each consumer, in the order given; empty for None.

    Raises:
        SteeringError: ``value`` has another form; its ``field`` is the path of the invalid value.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise SteeringError(
            field,
            f"must be {{consumer: spec}} such as {_EXAMPLE}, not {shown(value)} ({type(value).__name__})"
            + ("; put the spec under the name of a consumer" if isinstance(value, CaptureSpec) else ""),
        )
    if not value:
        raise SteeringError(field, "is empty; name a consumer, or omit the field")
    if len(value) > MAX_CONSUMERS:
        raise SteeringError(field, f"names {len(value)} consumers; a request may name at most {MAX_CONSUMERS}")
    for key in ("hooks", *POINT_NAMES):
        if key in value and not _is_spec(value[key]):
            spec = '{"hooks": ...}' if key == "hooks" else f'{{"hooks": {{"{key}": ...}}}}'
            raise SteeringError(
                field, f'{key!r} is not a consumer; put the spec under the name of a consumer: {{"memory": {spec}}}'
            )
    parsed: dict[str, CaptureSpec] = {}
    for key, spec in value.items():
        name = _read_consumer_name(key, field)
        parsed[name] = spec if isinstance(spec, CaptureSpec) else _spec_of_dict(spec, f"{field}.{name}")
    return tuple(parsed.items())


def _is_spec(value: object) -> bool:
    return isinstance(value, CaptureSpec) or (isinstance(value, Mapping) and "hooks" in value)


def _read_consumer_name(key: object, field: str) -> str:
    if not isinstance(key, str) or not _CONSUMER_NAME.fullmatch(key):
        raise SteeringError(
            field,
            f"{shown(key)} is not a valid consumer name; use lower-case letters, digits, - and _, a letter first",
        )
    return str(key)


def _spec_of_dict(spec: object, path: str) -> CaptureSpec:
    if not isinstance(spec, Mapping):
        raise SteeringError(
            path,
            f'must be a spec such as {{"hooks": {{"post_block": [12]}}}}, not {shown(spec)} ({type(spec).__name__})',
        )
    if "hooks" not in spec:
        hint = next((f"; {shown(key)} belongs in hooks" for key in spec if key in POINT_NAMES), "")
        hint = hint or next(
            (f"; {key} is not a field of a spec" for key in spec if ARGUMENT_ALIASES.get(key) == "hooks"), ""
        )
        raise SteeringError(f"{path}.hooks", f'is missing; name the sites, such as {{"post_block": [12]}}{hint}')
    if "tokens" in spec:
        raise SteeringError(f"{path}.tokens", "is not a field of a capture; use positions")
    given: dict[str, Any] = {name: spec[name] for name in SPEC_KEYS if name in spec}
    options = {name: value for name, value in spec.items() if name not in SPEC_KEYS}
    try:
        return CaptureSpec(**given, options=options)
    except SteeringError as error:
        # In a dict, options are on the same level as the spec's own keys.
        raise SteeringError(f"{path}.{error.field.removeprefix('options.')}", error.problem) from None


def _read_hooks(value: object) -> Hooks:
    if isinstance(value, (list, tuple)):
        return _read_site_names(value)
    if not isinstance(value, Mapping):
        raise SteeringError("hooks", f"must be {_HOOKS_FORM}, not {shown(value)} ({type(value).__name__})")
    if not value:
        raise SteeringError("hooks", f"is empty; name at least one of {', '.join(POINT_NAMES)}")
    by_point: dict[PointName, Layers] = {}
    for key, layers in value.items():
        point = read_point(key, "hooks", '{"post_block": [12]}')
        if point in by_point:
            raise SteeringError("hooks", f"names {point} twice, the second time as {shown(key)}; join the layers")
        by_point[point] = read_layers(layers, f"hooks.{point}")
    return tuple((point, by_point[point]) for point in POINT_NAMES if point in by_point)


def _read_site_names(names: list[object] | tuple[object, ...]) -> Hooks:
    """Return the hooks of a list of names such as ``blocks.3.hook_resid_post``."""
    if not names:
        raise SteeringError("hooks", 'is empty; name at least one site such as "resid_post.12"')
    if len(names) > MAX_LAYERS:
        raise SteeringError("hooks", f'has {len(names)} sites; at most {MAX_LAYERS}; use {{"post_block": "all"}}')
    by_point: dict[PointName, set[int]] = {}
    for i, name in enumerate(names):
        point, layer = read_site(name, f"hooks[{i}]")
        if layer is None:
            raise SteeringError("hooks", f"must be {_HOOKS_FORM}; {shown(name)} has no layer")
        if layer in by_point.setdefault(point, set()):
            raise SteeringError(f"hooks[{i}]", f"repeats {point} of layer {layer}; name each site once")
        by_point[point].add(layer)
    return tuple((point, tuple(sorted(by_point[point]))) for point in POINT_NAMES if point in by_point)


def _read_positions(value: object) -> Selector:
    if isinstance(value, str):
        if value in PARTS:
            raise _part_error(value)
        name: Any = read_choice(value, _NAMES, "positions", aliases=POSITION_ALIASES)
        return Selector(POSITIONS.get(name, name))
    unknown = isinstance(value, Mapping) and not any(key in SpanForm.__struct_fields__ for key in value)
    if unknown or not isinstance(value, (list, tuple, range, Selector, Mapping)):
        raise selector_form_error(value, _NAMES, "positions", keys="generated")
    selector = Selector.parse(value, "positions")
    if selector.spans:
        raise _part_error(selector.to_wire())
    return selector


def _part_error(value: object) -> SteeringError:
    return SteeringError(
        "positions",
        f"{shown(value)} is a part of the output, which captures do not support because rows are reserved by "
        "position; use all_prompt or all_generated, and select rows by the positions of the result",
    )


def _read_flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise SteeringError(field, f"must be true or false, not {shown(value)} ({type(value).__name__})")
    return value


def _read_reduce(value: object) -> Reduce:
    if value is None or isinstance(value, (Projection, NamedProjection)):
        return value
    if isinstance(value, str) and value in REDUCTIONS:
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

# SPDX-License-Identifier: Apache-2.0
"""Capture specs: the rows that a request captures, and the consumers that receive them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_CONSUMERS, MAX_LAYERS
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.request.consumer_options import NO_OPTIONS, read_options
from vllm_steer.request.field_types import any_of, form_of
from vllm_steer.request.message_parts import PARTS, PROMPT_PARTS, GeneratedForm, PromptPartName, SpanForm
from vllm_steer.request.projection import DirectionsForm, DirectionsInput, NamedProjection, ProbesForm, Projection
from vllm_steer.request.scalars import read_choice, read_flag, shown, suggest_arguments
from vllm_steer.request.selector import (
    POSITION_ALIASES,
    POSITIONS,
    PositionListForm,
    PositionsName,
    Selector,
    TokensInput,
    selector_form_error,
)
from vllm_steer.request.sites import NAMES_LISTED, Layers, LayersForm, LayersInput, read_layers, read_point, read_site
from vllm_steer.request.vector import ByContent, to_builtins

DtypeName = Literal["float32", "float16", "bfloat16"]
ReduceName = Literal["mean", "last"]
DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)
REDUCTIONS: tuple[ReduceName, ...] = get_args(ReduceName)
Hooks: TypeAlias = tuple[tuple[PointName, Layers], ...]
HooksInput: TypeAlias = "Mapping[PointName, LayersInput] | Mapping[str, LayersInput] | Sequence[str]"
PositionsInput: TypeAlias = PositionsName | TokensInput
Reduce: TypeAlias = ReduceName | Projection | NamedProjection | None
ReduceInput: TypeAlias = (
    ReduceName | Projection | NamedProjection | Mapping[Literal["directions", "probes"], DirectionsInput] | None
)

DTYPE_ALIASES: Mapping[str, DtypeName] = MappingProxyType(
    {f"torch.{name}": name for name in DTYPES}
    | dict.fromkeys(("fp32", "float", "single"), "float32")
    | dict.fromkeys(("fp16", "half"), "float16")
    | {"bf16": "bfloat16"}
)
"""Dtypes by other names, for error messages."""
ARGUMENT_ALIASES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("hook", "layer", "layers", "point", "points", "sites"), "hooks")
    | dict.fromkeys(("position", "tokens", "token_positions"), "positions")
    | {"reduction": "reduce", "pooling": "reduce"}
)
"""Fields of a capture spec by names that other interfaces use, for error messages."""
_NAMES: tuple[PositionsName | PromptPartName, ...] = (*POSITIONS, *PROMPT_PARTS)
"""Names of `positions`."""
_CONSUMER_NAME = re.compile("[a-z][a-z0-9_-]{0,63}")
_HOOKS_FORM = '{point: layers or "all"} such as {"post_block": [12]}, or a list of sites such as ["resid_post.12"]'
_EXAMPLE = '{"memory": {"hooks": {"post_block": [12]}, "positions": "last_prompt"}}'


@dataclass(frozen=True, init=False, repr=False, eq=False)
class CaptureSpec(ByContent):
    """Rows that one consumer receives. In JSON, all other keys are options of the consumer.

    A spec is validated on construction and immutable. All arguments are keyword-only. Equality and hash are by content.

    Examples:
        >>> from vllm_steer import CaptureSpec
        >>> CaptureSpec(hooks={"post_block": range(2)}, positions="all").hooks
        (('post_block', (0, 1)),)
    """

    # The attributes declare the JSON form: types and descriptions. The constructor has the defaults.
    hooks: Annotated[
        Hooks,
        any_of(dict[str, LayersForm], list[str]),
        msgspec.Meta(
            description=f"Layers by hook point ({', '.join(POINT_NAMES)}), or a list of names of sites in other "
            f"libraries, such as `blocks.3.hook_resid_post`; {NAMES_LISTED}.",
        ),
    ]
    """Points in order of computation, each with ascending layer numbers or ``"all"``."""
    positions: Annotated[
        Selector,
        any_of(PositionsName | PromptPartName | PositionListForm | GeneratedForm),
        msgspec.Meta(
            description="Tokens to capture: a name, the messages of a role, images, a list of positions, or positions "
            "that count from the first generated token."
        ),
    ]
    before: Annotated[bool, msgspec.Meta(description="Capture before the edits of the same point apply.")]
    dtype: Annotated[
        DtypeName | None, msgspec.Meta(description="Type that rows are converted to; null for the model's own.")
    ]
    reduce: Annotated[
        Reduce,
        any_of(ReduceName | None, DirectionsForm, ProbesForm),
        msgspec.Meta(
            description="`mean` or `last` of the rows of a site, or projections of each row on directions: "
            "`{directions: [[...]]}` or, for probes of registered modules, `{probes: [module/probe]}`."
        ),
    ]
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
            "positions": _read_positions(positions),
            "before": read_flag(before, "before"),
            "dtype": None if dtype is None else read_choice(dtype, DTYPES, "dtype", aliases=DTYPE_ALIASES),
            "reduce": _read_reduce(reduce),
            "_options": read_options(options),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def tokens(self) -> Selector:
        """The tokens to capture; equal to `positions`."""
        return self.positions

    @property
    def options(self) -> dict[str, Any]:
        """A new dict of the consumer's options."""
        options: dict[str, Any] = json.loads(self._options) if self._options != NO_OPTIONS else {}
        return options

    def with_changes(self, **changes: Any) -> "CaptureSpec":
        """Return the spec with other values of some arguments."""
        return CaptureSpec(**{**self._arguments(), **changes})

    def _arguments(self) -> dict[str, Any]:
        values = dict(zip(SPEC_KEYS, _VALUES(self), strict=False))
        return {**values, "hooks": dict(self.hooks), "options": self.options}

    def to_wire(self) -> dict[str, object]:
        """Return the spec as builtins for msgpack; `from_wire` is the inverse."""
        return {name: to_builtins(value) for name, value in zip(_WIRE_KEYS, _VALUES(self), strict=True)}

    @classmethod
    def from_wire(cls, obj: object) -> "CaptureSpec":
        """Decode the result of `to_wire`; raise SteeringError on anything else."""
        if not isinstance(obj, Mapping) or set(obj) != set(_WIRE_KEYS):
            raise SteeringError("capture", "is not an encoded capture spec")
        try:
            hooks, options, reduce = dict(obj["hooks"]), json.loads(obj["options"]), obj["reduce"]
        except (TypeError, ValueError) as error:
            raise SteeringError("capture", f"is not an encoded capture spec: {shown(str(error))}") from None
        if isinstance(reduce, Mapping) and "probes" not in reduce:
            reduce = Projection.from_wire(reduce)
        positions = Selector.from_wire(obj["positions"])
        return cls(**{**obj, "hooks": hooks, "positions": positions, "reduce": reduce, "options": options})

    def _content(self) -> object:
        return _VALUES(self)

    def __repr__(self) -> str:
        values = self._arguments() | {"positions": self.tokens.to_wire()}
        return f"CaptureSpec({', '.join(f'{name}={value!r}' for name, value in values.items() if value)})"


CaptureForm: Any = form_of(CaptureSpec, "options", closed=False)
"""JSON form of a capture spec."""
SPEC_KEYS: tuple[str, ...] = CaptureForm.__struct_fields__
_WIRE_KEYS = (*SPEC_KEYS, "options")
_VALUES = attrgetter(*SPEC_KEYS, "_options")


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

# SPDX-License-Identifier: Apache-2.0
"""Edits of the residual stream."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_CONDITIONS
from vllm_steer.points import OPTIONAL_POINTS, POINTS_FLAG, PointName
from vllm_steer.spec.arguments import suggest_arguments
from vllm_steer.spec.condition import Condition, ConditionForm, WhenInput, read_when
from vllm_steer.spec.references import read_name
from vllm_steer.spec.scalars import read_choice, read_number
from vllm_steer.spec.selector import PositionListForm, Selector, SelectorName, TokensInput
from vllm_steer.spec.sites import Layers, LayersForm, LayersInput, PointForm, read_layers_of, read_site
from vllm_steer.spec.vector import Vector, VectorForm, VectorInput, pack_vector, parse_vector

KindName = Literal["add", "add_normed", "ablate", "clamp"]

KIND_ALIASES: Mapping[str, KindName] = MappingProxyType(
    {
        "addition": "add",
        "additive": "add",
        "steer": "add",
        "norm_match": "add_normed",
        "ablation": "ablate",
        "project_out": "ablate",
        "clip": "clamp",
    }
)
"""Kinds by names that other interfaces use, for error messages."""
ARGUMENT_ALIASES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("scale", "coeff", "coefficient", "multiplier", "alpha", "factor", "weight"), "strength")
    | dict.fromkeys(("layer", "layer_indices"), "layers")
    | dict.fromkeys(("hook", "hook_point", "site"), "point")
    | dict.fromkeys(("position", "positions", "position_indices", "token_positions", "selector"), "tokens")
    | dict.fromkeys(("direction", "activations"), "vector")
    | {"type": "kind", "op": "kind", "min": "low", "max": "high"}
)
"""Arguments of an edit by names that other interfaces use, for error messages."""


@dataclass(frozen=True, slots=True)
class EditKind:
    """Definition of one kind of edit."""

    name: KindName
    params: tuple[str, ...]
    """The parameters of `Edit` that it uses besides kind, point, layers and tokens."""
    needs_direction: bool
    """Whether it uses the direction of the vector, which must not be zero then."""
    formula: str
    """New value of a row x of the stream. v is the vector, u = v / ||v||, s the strength."""


KINDS: Mapping[KindName, EditKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            EditKind("add", ("vector", "strength"), False, "x + s v"),
            EditKind("add_normed", ("vector", "strength"), True, "x + s ||x|| u"),
            EditKind("ablate", ("vector", "strength"), True, "x - s (x.u) u"),
            EditKind(
                "clamp",
                ("vector", "strength", "low", "high"),
                True,
                "x + s (clip(x.u, low, high) - x.u) u",
            ),
        )
    }
)


class EditForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One edit of the residual stream."""

    kind: Annotated[
        KindName,
        msgspec.Meta(
            description="New value of a row x; v is the vector, u its direction and s the strength: "
            + "; ".join(f"`{kind.name}`: {kind.formula}" for kind in KINDS.values())
            + "."
        ),
    ]
    point: Annotated[
        PointForm,
        msgspec.Meta(
            description=f"Hook point; {', '.join(OPTIONAL_POINTS)} need {POINTS_FLAG}. Names of other libraries are "
            "accepted (docs/reference/points.md)."
        ),
    ]
    vector: VectorForm
    layers: Annotated[
        LayersForm | None,
        msgspec.Meta(
            description='One layer, a list of layers, or "all". Omit it if the name of the point has a layer.'
        ),
    ] = None
    strength: Annotated[float, msgspec.Meta(description="Multiplies the edit.")] = 1.0
    tokens: Annotated[
        SelectorName | PositionListForm | None,
        msgspec.Meta(
            description="Tokens to edit: a name, or a list of positions. Default `all`; `generated` if `when` has a "
            "window other than `token`."
        ),
    ] = None
    low: Annotated[
        float | None, msgspec.Meta(description="`clamp` only: lowest projection on the direction; null for no bound.")
    ] = None
    high: Annotated[
        float | None, msgspec.Meta(description="`clamp` only: highest projection on the direction; null for no bound.")
    ] = None
    when: Annotated[
        Annotated[list[ConditionForm], msgspec.Meta(min_length=1, max_length=MAX_CONDITIONS)] | ConditionForm | None,
        msgspec.Meta(description="Conditions on readouts, all of which must hold; null to edit always."),
    ] = None
    live: Annotated[
        str | None,
        msgspec.Meta(
            description="Name of a factor of the strength, 1 at first, that can be changed during the request."
        ),
    ] = None


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Edit:
    """An edit of the residual stream, validated on construction and immutable.

    All arguments are keyword-only. Equality and hash are by content.

    In requests, an edit is a JSON object with the arguments as keys.

    Example:
        >>> from vllm_steer import Edit
        >>> edit = Edit(kind="add", point="post_block", layers=range(3, 5), vector=[1.0, 0.0], tokens="generated")
        >>> edit.layers, edit.vector.shape, edit.strength
        ((3, 4), (2,), 1.0)
    """

    kind: KindName
    """The computation: a name in `KINDS`."""
    point: PointName
    """The hook point: a name in `vllm_steer.points.POINTS`."""
    layers: Layers
    """Ascending layer numbers, or ``"all"``."""
    vector: Vector
    """float32 ``[H]``, finite, read-only; not zero if the kind needs a direction."""
    strength: float
    """Multiplies the edit."""
    tokens: Selector
    """The tokens to edit."""
    low: float | None
    """``clamp`` only: lowest projection on the vector's direction; None for no bound."""
    high: float | None
    """``clamp`` only: highest projection on the vector's direction; None for no bound."""
    when: tuple[Condition, ...]
    """Conditions that scale the edit, all of which must hold; empty to edit always."""
    live: str | None
    """Name of a factor of the strength that can be changed during the request."""

    @suggest_arguments(ARGUMENT_ALIASES)
    def __init__(
        self,
        *,
        kind: KindName,
        point: PointName | str,
        layers: "LayersInput | None" = None,
        vector: VectorInput,
        strength: float = 1.0,
        tokens: "TokensInput | None" = None,
        low: float | None = None,
        high: float | None = None,
        when: WhenInput = None,
        live: str | None = None,
    ) -> None:
        """Validate the arguments.

        Args:
            kind: ``"add"``, ``"add_normed"``, ``"ablate"`` or ``"clamp"``.
            point: ``"pre_attn"``, ``"post_attn"`` or ``"post_block"``. Engines that were started with them also have
                ``"attn_out"``, ``"mlp_in"`` and ``"mlp_out"``, which edit a row of that branch instead of the stream.
                Names of other libraries, such as ``"hook_resid_post"``, are accepted (docs/reference/points.md).
            layers: One layer; a list, tuple, range, numpy array or torch tensor of layers; or ``"all"``. Omit it if
                the name of the point has a layer, as ``"blocks.3.hook_resid_post"``.
            vector: A list, numpy array or torch tensor of shape ``[H]``, the model's hidden size, or the packed form
                ``{"dtype": ..., "shape": ..., "data": ...}``.
            strength: A finite number.
            tokens: ``"all"``, ``"prompt"``, ``"generated"``, ``"last_prompt"``, or a list of positions and
                ``[start, stop]`` pairs. Default ``"all"``; ``"generated"`` if ``when`` has a window other
                than ``"token"``.
            low: Lower bound of ``clamp``, which needs ``low``, ``high`` or both, with ``low <= high``.
            high: Upper bound of ``clamp``.
            when: A condition on a readout of the request, such as ``{"readout": "refusal", "above": 0.6}``, or a list
                of conditions, all of which must hold. :class:`~vllm_steer.spec.condition.ConditionForm` lists the keys.
            live: Name of a factor of the strength, 1 at first, that ``set_strength`` changes during the request.

        Raises:
            SteeringError: A value is invalid; its ``field`` is the argument's name, with an index if any.
        """
        definition = KINDS[read_choice(kind, KINDS, "kind", aliases=KIND_ALIASES)]
        conditions = read_when(when)
        if tokens is None:
            tokens = "generated" if any(each.window != "token" for each in conditions) else "all"
        place, named_layer = read_site(point, "point")
        checked = {
            "kind": definition.name,
            "point": place,
            "layers": read_layers_of(named_layer, layers, place),
            "vector": _read_direction(vector, definition),
            "strength": read_number(strength, "strength"),
            "tokens": Selector.parse(tokens),
            **_read_bounds(low, high, definition),
            "when": conditions,
            "live": None if live is None else read_name(live, "live"),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def to_wire(self) -> dict[str, object]:
        """Return the JSON form with the vector packed."""
        wire = self._values() | {
            "layers": self.layers if self.layers == "all" else list(self.layers),
            "vector": pack_vector(self.vector),
            "tokens": self.tokens.to_wire(),
            "when": [condition.to_wire() for condition in self.when] or None,
        }
        return {name: value for name, value in wire.items() if value is not None}

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _content(self) -> tuple[object, ...]:
        return tuple((self._values() | {"vector": self.vector.tobytes()}).values())

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Edit) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __repr__(self) -> str:
        norm = float(np.linalg.norm(self.vector.astype(np.float64)))
        summary = f"<float32[{self.vector.size}], norm {norm:.4g}>"
        values = {
            name: repr(value)
            for name, value in self._values().items()
            if value is not None and not (isinstance(value, tuple) and not value)
        }
        return f"Edit({', '.join(f'{k}={v}' for k, v in (values | {'vector': summary}).items())})"

    def __deepcopy__(self, memo: object) -> "Edit":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, because an unpickled array would be writeable.
        return partial(Edit, **self._values()), ()


def _read_direction(value: object, kind: EditKind) -> Vector:
    vector = parse_vector(value)
    if kind.needs_direction and not vector.any():
        raise SteeringError(
            "vector", f"is zero in float32; {kind.name} ({kind.formula}) needs a vector with a direction"
        )
    return vector


def _read_bounds(low: object, high: object, kind: EditKind) -> dict[str, float | None]:
    given = {"low": low, "high": high}
    bounds = {k: None if v is None else read_number(v, k) for k, v in given.items()}
    for name, bound in bounds.items():
        if bound is not None and name not in kind.params:
            takers = ", ".join(other.name for other in KINDS.values() if name in other.params)
            raise SteeringError(name, f"is not a parameter of {kind.name}, only of {takers}; omit it")
    if "low" in kind.params and "high" in kind.params:
        if bounds["low"] is None and bounds["high"] is None:
            raise SteeringError("low", f"{kind.name} needs low, high or both")
        if bounds["low"] is not None and bounds["high"] is not None and bounds["low"] > bounds["high"]:
            raise SteeringError("low", f"{bounds['low']} is above high, {bounds['high']}; swap them")
    return bounds

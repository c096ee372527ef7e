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
from vllm_steer.limits import MAX_CONDITIONS, MAX_SAE_FEATURES
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES, POINTS_FLAG, PointName
from vllm_steer.request.arguments import suggest_arguments
from vllm_steer.request.capture_source import CapturedRows, RowsForm, is_captured, refuse_names, rows_of
from vllm_steer.request.condition import Condition, WhenInput, read_when
from vllm_steer.request.feature import PARAMETERS as FEATURE_PARAMETERS
from vllm_steer.request.feature import FeatureEdit, no_vector, read_feature_edit
from vllm_steer.request.matrix import (
    Matrix,
    MatrixForm,
    MatrixInput,
    check_num_rows,
    is_matrix,
    parse_matrix,
    parse_subspace,
)
from vllm_steer.request.references import read_name
from vllm_steer.request.scalars import is_integer, read_choice, read_number, shown
from vllm_steer.request.selector import OPEN_END, Selector, TokensForm, TokensInput, plain_positions
from vllm_steer.request.sites import NAMES_LISTED, Layers, LayersForm, LayersInput, PointForm, read_layers_of, read_site
from vllm_steer.request.vector import Vector, VectorInput, pack_array, parse_vector

KindName = Literal["add", "add_normed", "ablate", "clamp", "replace", "feature"]

KIND_ALIASES: Mapping[str, KindName] = MappingProxyType(
    {
        "addition": "add",
        "additive": "add",
        "steer": "add",
        "norm_match": "add_normed",
        "ablation": "ablate",
        "project_out": "ablate",
        "clip": "clamp",
        "patch": "replace",
        "interchange": "replace",
        "lerp": "replace",
        "set": "replace",
    }
)
"""Kinds by names that other interfaces use, for error messages."""
ARGUMENT_ALIASES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("scale", "coeff", "coefficient", "multiplier", "alpha", "factor", "weight"), "strength")
    | dict.fromkeys(("layer", "layer_indices"), "layers")
    | dict.fromkeys(("hook", "hook_point", "site"), "point")
    | dict.fromkeys(("position", "positions", "position_indices", "token_positions", "selector"), "tokens")
    | dict.fromkeys(("direction", "activations", "rows", "matrix", "value"), "vector")
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
    takes_matrix: bool = False
    """Whether the vector may be a matrix with one row for each position."""


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
            EditKind(
                "replace",
                ("vector", "strength", "subspace"),
                False,
                "x + s (v - x), or x + s P(v - x); P is the projection on the span of the subspace",
                takes_matrix=True,
            ),
            EditKind(
                "feature",
                ("strength", *FEATURE_PARAMETERS),
                False,
                "x + s (set - a) d, or x + s add d; a is the activation of a feature, d its decoder direction",
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
        PointForm | None,
        msgspec.Meta(
            description="Required, except for a `feature` whose autoencoder names its site. "
            f"Hook point; {', '.join(OPTIONAL_POINTS)} need {POINTS_FLAG}. Names of other libraries are "
            f"accepted, such as `hook_resid_post`; {NAMES_LISTED}."
        ),
    ] = None
    vector: RowsForm = None
    layers: Annotated[
        LayersForm | None,
        msgspec.Meta(
            description='One layer, a list of layers, or "all". Omit it if the name of the point, or the autoencoder '
            "of a `feature`, has a layer."
        ),
    ] = None
    strength: Annotated[float, msgspec.Meta(description="Multiplies the edit.")] = 1.0
    tokens: Annotated[
        TokensForm | None,
        msgspec.Meta(
            description="Tokens to edit: a name, a part of the output or a list of positions. Default `all`; "
            "`generated` if `when` has a window other than `token`."
        ),
    ] = None
    low: Annotated[
        float | None, msgspec.Meta(description="`clamp` only: lowest projection on the direction; null for no bound.")
    ] = None
    high: Annotated[
        float | None, msgspec.Meta(description="`clamp` only: highest projection on the direction; null for no bound.")
    ] = None
    subspace: Annotated[
        MatrixForm | None,
        msgspec.Meta(description="`replace` only: directions; only the component in their span is replaced."),
    ] = None
    sae: Annotated[
        str | None, msgspec.Meta(description="`feature` only: name of a sparse autoencoder of the server.")
    ] = None
    feature: Annotated[
        Annotated[int, msgspec.Meta(ge=0, lt=MAX_SAE_FEATURES)] | None,
        msgspec.Meta(description="`feature` only: number of the feature."),
    ] = None
    set: Annotated[
        float | None, msgspec.Meta(description="`feature` only: new activation; not for TopK autoencoders.")
    ] = None
    add: Annotated[float | None, msgspec.Meta(description="`feature` only: added to the activation.")] = None
    when: Annotated[
        Annotated[list[Condition], msgspec.Meta(min_length=1, max_length=MAX_CONDITIONS)] | Condition | None,
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

    All arguments other than ``kind`` are keyword-only. Equality and hash are by content.

    In requests, an edit is a JSON object with the arguments as keys.

    Examples:
        >>> from vllm_steer import Edit
        >>> edit = Edit(kind="add", point="post_block", layers=range(3, 5), vector=[1.0, 0.0], tokens="generated")
        >>> edit.layers, edit.vector.shape, edit.strength
        ((3, 4), (2,), 1.0)
    """

    kind: KindName
    """The computation: a name in `KINDS`."""
    point: PointName | None
    """The hook point: a name in `vllm_steer.points.POINTS`. None for the site of a feature's autoencoder."""
    layers: Layers
    """Ascending layer numbers, or ``"all"``; empty for the site of a feature's autoencoder."""
    vector: Vector
    """float32 ``[H]``, finite, read-only; not zero if the kind needs a direction. ``replace`` may have a matrix
    ``[n, H]`` instead, with one row for each of the n positions in ``tokens``, ascending."""
    strength: float
    """Multiplies the edit."""
    tokens: Selector
    """The tokens to edit."""
    low: float | None
    """``clamp`` only: lowest projection on the vector's direction; None for no bound."""
    high: float | None
    """``clamp`` only: highest projection on the vector's direction; None for no bound."""
    subspace: Matrix | None
    """``replace`` only: float32 ``[k, H]``, linearly independent directions in whose span rows are replaced; None for
    the whole row."""
    feature: FeatureEdit | None
    """``feature`` only: the feature and its change. The vector is then empty."""
    when: tuple[Condition, ...]
    """Conditions that scale the edit, all of which must hold; empty to edit always."""
    live: str | None
    """Name of a factor of the strength that can be changed during the request."""

    @suggest_arguments(ARGUMENT_ALIASES)
    def __init__(
        self,
        kind: KindName,
        *,
        point: PointName | str | None = None,
        layers: "LayersInput | None" = None,
        vector: "VectorInput | MatrixInput | CapturedRows | None" = None,
        strength: float = 1.0,
        tokens: "TokensInput | None" = None,
        low: float | None = None,
        high: float | None = None,
        subspace: "MatrixInput | None" = None,
        sae: str | None = None,
        feature: int | None = None,
        set: float | None = None,
        add: float | None = None,
        when: WhenInput = None,
        live: str | None = None,
    ) -> None:
        """Validate the arguments.

        Args:
            kind: ``"add"``, ``"add_normed"``, ``"ablate"``, ``"clamp"``, ``"replace"`` or ``"feature"``.
            point: ``"pre_attn"``, ``"post_attn"`` or ``"post_block"``. Engines that were started with them also have
                ``"attn_out"``, ``"mlp_in"`` and ``"mlp_out"``, which edit a row of that branch instead of the stream.
                Names of other libraries, such as ``"hook_resid_post"``, are accepted (docs/reference/points.md).
                ``feature`` may leave out point and layers if the files of its autoencoder name them.
            layers: One layer; a list, tuple, range, numpy array or torch tensor of layers; or ``"all"``. Omit it if
                the name of the point has a layer, as ``"blocks.3.hook_resid_post"``.
            vector: A list, numpy array or torch tensor of shape ``[H]``, the model's hidden size, or the packed form
                ``{"dtype": ..., "shape": ..., "data": ...}``. For ``replace`` also a matrix ``[n, H]``, with one row
                for each of the n positions in ``tokens``, in ascending order of the positions, or a
                ``CaptureResult``, whose rows of the same site and positions are used; without ``tokens``, all of its
                rows. ``feature`` has none.
            strength: A finite number. For ``replace``, 1 puts the row there and numbers between 0 and 1 interpolate.
            tokens: ``"all"``, ``"prompt"``, ``"generated"``, ``"last_prompt"``, ``"image"``, ``"thinking"``,
                ``"answer"``, ``"tool_call"``, a list of positions and ``[start, stop]`` pairs, or a dict of
                `SpanForm`'s fields. Default ``"all"``; ``"generated"`` if ``when`` has a
                window other than ``"token"``.
            low: Lower bound of ``clamp``, which needs ``low``, ``high`` or both, with ``low <= high``.
            high: Upper bound of ``clamp``.
            subspace: For ``replace``, a matrix ``[k, H]`` of linearly independent directions: only the component of a
                row in their span is replaced.
            sae: For ``feature``, the name of a sparse autoencoder of the engine.
            feature: For ``feature``, the number of the feature.
            set: For ``feature``, the new activation; TopK autoencoders are refused.
            add: For ``feature``, a number that is added to the activation, instead of ``set``.
            when: A condition on a readout of the request, such as ``{"readout": "refusal", "above": 0.6}``, or a list
                of conditions, all of which must hold. `Condition` lists the keys.
            live: Name of a factor of the strength, 1 at first, that ``set_strength`` changes during the request.

        Raises:
            SteeringError: A value is invalid; its ``field`` is the argument's name, with an index if any.
        """
        definition = KINDS[read_choice(kind, KINDS, "kind", aliases=KIND_ALIASES)]
        conditions = read_when(when)
        place, named_layer = (None, None) if point is None else read_site(point, "point")
        if place is None and definition.name != "feature":
            raise SteeringError("point", f"is missing; use one of {', '.join(POINT_NAMES)}")
        given = {"sae": sae, "feature": feature, "set": set, "add": add}
        chosen: FeatureEdit | None = None
        if definition.name == "feature":
            chosen = read_feature_edit(sae, feature, set, add)
            for name, unused in (("vector", vector), ("subspace", subspace)):
                if unused is not None:
                    raise SteeringError(name, "is not a parameter of feature; its vectors are those of sae; omit it")
            rows = no_vector()
        else:
            for name in (name for name, value in given.items() if value is not None):
                _check_parameter(name, definition)
            if vector is None:
                raise SteeringError("vector", f"is missing; {definition.name} needs a vector, of the hidden size")
            refuse_names(vector, takes_matrix=definition.takes_matrix)
            if is_captured(vector):
                if not definition.takes_matrix:
                    raise SteeringError("vector", f"is a capture, which {definition.name} does not take; use replace")
                captured_layers = read_layers_of(named_layer, layers, place)
                vector, tokens = rows_of(vector, str(place), captured_layers, tokens)
            rows = _read_rows(vector, definition)
        if tokens is None:
            tokens = "generated" if any(each.window != "token" for each in conditions) else "all"
        checked = {
            "kind": definition.name,
            "point": place,
            "layers": ()
            if chosen is not None and layers is None and named_layer is None
            else read_layers_of(named_layer, layers, place),
            "vector": rows,
            "strength": read_number(strength, "strength"),
            "tokens": Selector.parse(tokens),
            **_read_bounds(low, high, definition),
            "subspace": _read_subspace(subspace, rows, definition),
            "feature": chosen,
            "when": conditions,
            "live": None if live is None else read_name(live, "live"),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.num_rows is not None:
            _check_order(tokens)
            check_num_rows(self.num_rows, self.tokens)

    @property
    def width(self) -> int:
        """Number of components of the vector, or of each row of the matrix."""
        return int(self.vector.shape[-1])

    @property
    def num_rows(self) -> int | None:
        """Number of rows of the matrix; None if the edit has one vector."""
        return int(self.vector.shape[0]) if self.vector.ndim == 2 else None

    def to_wire(self) -> dict[str, object]:
        """Return the JSON form with the vector and the subspace packed."""
        wire = self._values() | {
            "layers": self.layers if self.layers == "all" else list(self.layers) or None,
            "vector": pack_array(self.vector) if self.feature is None else None,
            "subspace": None if self.subspace is None else pack_array(self.subspace),
            "tokens": self.tokens.to_wire(),
            "when": [condition.to_wire() for condition in self.when] or None,
            **self._feature_arguments(),
        }
        return {name: value for name, value in wire.items() if value is not None}

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _feature_arguments(self) -> dict[str, object]:
        return {name: getattr(self.feature, name, None) for name in FEATURE_PARAMETERS}

    def _content(self) -> tuple[object, ...]:
        subspace = None if self.subspace is None else (self.subspace.shape, self.subspace.tobytes())
        arrays = {"vector": (self.vector.shape, self.vector.tobytes()), "subspace": subspace}
        return tuple((self._values() | arrays).values())

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Edit) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __repr__(self) -> str:
        norm = float(np.linalg.norm(self.vector.astype(np.float64)))
        summary = {"vector": f"<float32{list(self.vector.shape)}, norm {norm:.4g}>"} if self.feature is None else {}
        if self.subspace is not None:
            summary["subspace"] = f"<float32{list(self.subspace.shape)}>"
        values = {
            name: repr(value)
            for name, value in (self._values() | ({} if self.feature is None else {"vector": None})).items()
            if value is not None and not (isinstance(value, tuple) and not value)
        }
        return f"Edit({', '.join(f'{k}={v}' for k, v in (values | summary).items())})"

    def __deepcopy__(self, memo: object) -> "Edit":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, because an unpickled array would be writeable.
        values = self._values() | self._feature_arguments() | {"layers": self.layers or None}
        return partial(Edit, **(values if self.feature is None else values | {"vector": None})), ()


def _read_rows(value: object, kind: EditKind) -> Vector:
    if kind.takes_matrix and is_matrix(value):
        return parse_matrix(value)
    vector = parse_vector(value)
    if kind.needs_direction and not vector.any():
        raise SteeringError(
            "vector", f"is zero in float32; {kind.name} ({kind.formula}) needs a vector with a direction"
        )
    return vector


def _read_subspace(value: object, rows: Vector, kind: EditKind) -> Matrix | None:
    if value is None:
        return None
    _check_parameter("subspace", kind)
    return parse_subspace(value, int(rows.shape[-1]))


def _check_order(tokens: object) -> None:
    """Raise SteeringError if positions are not listed in the order of a matrix's rows."""
    field = "tokens"
    if isinstance(tokens, range):
        # Two that are out of order, if any are; a range can be longer than memory.
        tokens = list(tokens[:2]) if tokens.step < 0 else sorted({tokens[0], tokens[-1]})
    elif isinstance(tokens, Mapping) and isinstance(tokens.get("generated"), list):
        field, tokens = "tokens.generated", tokens["generated"]
    if not isinstance(tokens, list):
        return
    if (places := plain_positions(tokens)) is not None and (np.diff(places + 2 * OPEN_END * (places < 0)) > 0).all():
        return  # in order: positions from the end of the prompt come after those from its start
    starts = [item if is_integer(item) else item[0] for item in tokens]
    order = [(start < 0, start) for start in starts]
    for i in range(1, len(order)):
        if order[i] <= order[i - 1]:
            raise SteeringError(
                f"{field}[{i}]",
                f"{shown(tokens[i])} follows {shown(tokens[i - 1])}; with a matrix, list positions in ascending order, "
                "those from the end of the prompt last: row i belongs to the i-th position",
            )


def _check_parameter(name: str, kind: EditKind) -> None:
    if name not in kind.params:
        takers = ", ".join(other.name for other in KINDS.values() if name in other.params)
        raise SteeringError(name, f"is not a parameter of {kind.name}, only of {takers}; omit it")


def _read_bounds(low: object, high: object, kind: EditKind) -> dict[str, float | None]:
    given = {"low": low, "high": high}
    bounds = {k: None if v is None else read_number(v, k) for k, v in given.items()}
    for name, bound in bounds.items():
        if bound is not None:
            _check_parameter(name, kind)
    if "low" in kind.params and "high" in kind.params:
        if bounds["low"] is None and bounds["high"] is None:
            raise SteeringError("low", f"{kind.name} needs low, high or both")
        if bounds["low"] is not None and bounds["high"] is not None and bounds["low"] > bounds["high"]:
            raise SteeringError("low", f"{bounds['low']} is above high, {bounds['high']}; swap them")
    return bounds

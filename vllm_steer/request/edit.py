# SPDX-License-Identifier: Apache-2.0
"""Edits of the residual stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_CONDITIONS, MAX_SAE_FEATURES
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES, POINTS_FLAG, PointName
from vllm_steer.request.capture_source import (
    VECTOR_FIELD,
    CapturedRows,
    DirectionSource,
    has_directions,
    is_captured,
    no_dose,
    refuse_names,
    rows_of,
)
from vllm_steer.request.condition import Condition, WhenInput, read_when
from vllm_steer.request.field_types import Number, any_of, extra, form_of, reader
from vllm_steer.request.matrix import (
    Matrix,
    MatrixForm,
    MatrixInput,
    check_num_rows,
    check_order,
    is_matrix,
    parse_matrix,
    parse_subspace,
)
from vllm_steer.request.references import Dose, Name
from vllm_steer.request.scalars import read_choice, suggest_arguments
from vllm_steer.request.selector import Selector, TokensForm, TokensInput
from vllm_steer.request.sites import NAMES_LISTED, Layers, LayersForm, LayersInput, PointForm, read_layers_of, read_site
from vllm_steer.request.vector import ByContent, Vector, VectorInput, parse_vector, to_builtins

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
    """Definition of one kind of edit. Checks, wire form, JSON Schema, reference and instruction derive from it.

    What it computes on the device is defined in :mod:`vllm_steer.taps.reference`.
    """

    name: KindName
    code: int
    """Number of its instruction on the device, which never changes its meaning: programs travel between processes.
    :mod:`vllm_steer.program.instructions` has the numbers of other instructions."""
    params: tuple[str, ...]
    """The parameters of `Edit` that it uses besides kind, point, layers, tokens, when and live."""
    formula: str
    """New value of a row x of the stream. v is the vector, u = v / ||v||, s the strength."""
    vectors: tuple[str, ...] = ("vector",)
    """The parameters that are vectors, all of which must be given."""
    required: tuple[str, ...] = ()
    """The other parameters that must be given."""
    either: tuple[str, ...] = ()
    """Parameters of which exactly one must be given."""
    needs_direction: bool = False
    """Whether it uses the direction of the vector, which must not be zero then."""
    takes_matrix: bool = False
    """Whether the vector may be a matrix with one row for each position."""
    finds_site: bool = False
    """Whether point and layers may be left out, because an autoencoder has them."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """Raises SteeringError if the parameters, by name, contradict each other."""


def _check_bounds(given: Mapping[str, Any]) -> None:
    low, high = given["low"], given["high"]
    if low is None and high is None:
        raise SteeringError("low", "clamp needs low, high or both")
    if low is not None and high is not None and low > high:
        raise SteeringError("low", f"{low} is above high, {high}; swap them")


KINDS: Mapping[KindName, EditKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            EditKind("add", 1, ("vector", "strength", "dose"), "x + s v"),
            EditKind("add_normed", 2, ("vector", "strength"), "x + s ||x|| u", needs_direction=True),
            EditKind("ablate", 3, ("vector", "strength"), "x - s (x.u) u", needs_direction=True),
            EditKind(
                "clamp",
                4,
                ("vector", "strength", "low", "high"),
                "x + s (clip(x.u, low, high) - x.u) u",
                needs_direction=True,
                check=_check_bounds,
            ),
            EditKind(
                "replace",
                8,
                ("vector", "strength", "subspace"),
                "x + s (v - x), or x + s P(v - x); P is the projection on the span of the subspace",
                takes_matrix=True,
            ),
            EditKind(
                "feature",
                11,
                ("strength", "sae", "feature", "set", "add"),
                "x + s (set - a) d, or x + s add d; a is the activation of a feature, d its decoder direction",
                vectors=(),
                required=("sae", "feature"),
                finds_site=True,
                either=("set", "add"),
            ),
        )
    }
)
_STRENGTH = float("1")
"""Default strength, a number of its own, which is recognised if a dose is given as well."""
_NO_VECTOR: Vector = np.frombuffer(b"", np.float32)
"""The vector of an edit whose vectors come from an autoencoder."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Edit(ByContent):
    """An edit of the residual stream.

    It is validated on construction and immutable. All arguments other than ``kind`` are keyword-only. Equality and hash
    are by content.

    In requests, an edit is a JSON object with the arguments as keys.

    Examples:
        >>> from vllm_steer import Edit
        >>> edit = Edit(kind="add", point="post_block", layers=range(3, 5), vector=[1.0, 0.0], tokens="generated")
        >>> edit.layers, edit.vector.shape, edit.strength
        ((3, 4), (2,), 1.0)
    """

    # The attributes declare the JSON form: types, bounds and descriptions. The constructor has the defaults.
    kind: Annotated[
        KindName,
        msgspec.Meta(
            description="New value of a row x; v is the vector, u its direction and s the strength: "
            + "; ".join(f"`{kind.name}`: {kind.formula}" for kind in KINDS.values())
            + "."
        ),
    ]
    """The computation: a name in `KINDS`."""
    point: Annotated[
        PointName | None,
        any_of(PointForm, None),
        msgspec.Meta(
            description="Required, except for a `feature` whose autoencoder names its site. "
            f"Hook point; {', '.join(OPTIONAL_POINTS)} need {POINTS_FLAG}. Names of other libraries are "
            f"accepted, such as `hook_resid_post`; {NAMES_LISTED}."
        ),
    ]
    """The hook point: a name in `vllm_steer.points.POINTS`. None for the site of a feature's autoencoder."""
    vector: Annotated[Vector, VECTOR_FIELD, msgspec.Meta(extra={"needs": "a vector, of the hidden size"})]
    """float32 ``[H]``, finite, read-only; not zero if the kind needs a direction. ``replace`` may have a matrix
    ``[n, H]`` instead, with one row for each of the n positions in ``tokens``, ascending. Empty for ``feature``."""
    layers: Annotated[
        Layers,
        any_of(LayersForm, None),
        msgspec.Meta(
            description='One layer, a list of layers, or "all". Omit it if the name of the point, or the autoencoder '
            "of a `feature`, has a layer."
        ),
    ]
    """Ascending layer numbers, or ``"all"``; empty for the site of a feature's autoencoder."""
    strength: Annotated[Number, msgspec.Meta(description="Multiplies the edit.")]
    dose: Annotated[
        Dose | None,
        msgspec.Meta(
            description="`add` only, instead of `strength`: norm of the added vector divided by the median norm of the "
            "stream at the site. The vector must come from a module or a file with this norm."
        ),
    ]
    """None once the edit is made: it has the `strength` that the dose means."""
    given_dose: float | None = field(init=False)
    """The dose that was given, for reports; edits are equal if their strengths are."""
    tokens: Annotated[
        Selector,
        any_of(TokensForm | None),
        msgspec.Meta(
            description="Tokens to edit: a name, a part of the output or a list of positions. Default `all`; "
            "`generated` if `when` has a window other than `token`."
        ),
    ]
    low: Annotated[
        Number | None, msgspec.Meta(description="`clamp` only: lowest projection on the direction; null for no bound.")
    ]
    high: Annotated[
        Number | None, msgspec.Meta(description="`clamp` only: highest projection on the direction; null for no bound.")
    ]
    subspace: Annotated[
        Matrix | None,
        any_of(MatrixForm, None),
        msgspec.Meta(description="`replace` only: directions; only the component in their span is replaced."),
    ]
    """Float32 ``[k, H]``, linearly independent; None for the whole row."""
    sae: Annotated[
        Name | None,
        msgspec.Meta(
            description="`feature` only: name of a sparse autoencoder of the server.",
            extra={"needs": "the name of an autoencoder of the engine (--steering-sae NAME=FOLDER)"},
        ),
    ]
    feature: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=MAX_SAE_FEATURES - 1, extra={"what": "the number of a feature, "})] | None,
        msgspec.Meta(description="`feature` only: number of the feature.", extra={"needs": "the number of a feature"}),
    ]
    set: Annotated[
        Number | None, msgspec.Meta(description="`feature` only: new activation; not for TopK autoencoders.")
    ]
    add: Annotated[Number | None, msgspec.Meta(description="`feature` only: added to the activation.")]
    when: Annotated[
        tuple[Condition, ...],
        any_of(Annotated[list[Condition], msgspec.Meta(min_length=1, max_length=MAX_CONDITIONS)], Condition, None),
        msgspec.Meta(description="Conditions on readouts, all of which must hold; null to edit always."),
    ]
    live: Annotated[
        Name | None,
        msgspec.Meta(
            description="Name of a factor of the strength, 1 at first, that can be changed during the request."
        ),
    ]

    @suggest_arguments(ARGUMENT_ALIASES)
    def __init__(
        self,
        kind: KindName,
        *,
        point: PointName | str | None = None,
        layers: "LayersInput | None" = None,
        vector: "VectorInput | MatrixInput | CapturedRows | DirectionSource | None" = None,
        strength: float | None = _STRENGTH,
        dose: float | None = None,
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
                rows. A ``Directions`` of ``vllm_steer.lab`` gives its vector of the layer. ``feature`` has none.
            strength: A finite number. For ``replace``, 1 puts the row there and numbers between 0 and 1 interpolate.
            dose: For ``add`` of a ``Directions``, instead of ``strength``: norm of the added vector divided by the
                median norm of the stream at the site.
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
        if place is None and not definition.finds_site:
            raise SteeringError("point", f"is missing; use one of {', '.join(POINT_NAMES)}")
        given: dict[str, Any] = {"low": low, "high": high, "sae": sae, "feature": feature, "set": set, "add": add}
        given |= {"vector": None if vector is _NO_VECTOR else vector, "subspace": subspace, "dose": dose}
        if dose is not None and strength is not _STRENGTH and strength is not None:
            raise SteeringError("dose", "cannot be combined with strength; give one of them")
        if definition.either and sum(given[name] is not None for name in definition.either) != 1:
            names = " or ".join(definition.either)
            raise SteeringError(definition.either[0], f"give either {names}, and only one of them")
        for name in definition.vectors + definition.required:
            if given[name] is None:
                raise SteeringError(name, f"is missing; {definition.name} needs {extra(_TYPES[name])['needs']}")
        for name, value in given.items():
            if value is not None and name not in definition.params:
                takers = ", ".join(other.name for other in KINDS.values() if name in other.params)
                raise SteeringError(name, f"is not a parameter of {definition.name}, only of {takers}; omit it")
            if value is not None and name in _READERS:
                given[name] = _READERS[name](value, name)
        if definition.check is not None:
            definition.check(given)
        omitted = definition.finds_site and named_layer is None and layers is None
        places = () if omitted else read_layers_of(named_layer, layers, place)
        if directed := has_directions(given["vector"]):
            direction = given["vector"].direction_at(place, places)
            given["vector"] = direction.vector
            strength = strength if dose is None else direction.strength(given["dose"])
        if "vector" in definition.params:
            given["vector"], tokens = _read_rows(given["vector"], definition, str(place), places, tokens)
        if dose is not None and not directed:
            raise no_dose("an array")
        if subspace is not None:
            given["subspace"] = parse_subspace(subspace, int(given["vector"].shape[-1]))
        if tokens is None:
            tokens = "generated" if any(each.window != "token" for each in conditions) else "all"
        given |= {"kind": definition.name, "point": place, "layers": places, "tokens": Selector.parse(tokens)}
        given |= {"vector": _NO_VECTOR if given["vector"] is None else given["vector"], "when": conditions}
        given |= {"strength": _READERS["strength"](strength, "strength"), "live": _READERS["live"](live, "live")}
        given |= {"dose": None, "given_dose": given["dose"]}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if self.num_rows is not None:
            check_order(tokens)
            check_num_rows(self.num_rows, self.tokens)

    @property
    def width(self) -> int:
        """Number of components of the vector, or of each row of the matrix; 0 without a vector."""
        return int(self.vector.shape[-1])

    @property
    def num_rows(self) -> int | None:
        """Number of rows of the matrix; None if the edit has one vector."""
        return int(self.vector.shape[0]) if self.vector.ndim == 2 else None

    def to_wire(self) -> dict[str, object]:
        """Return the JSON form with the vector and the subspace packed."""
        return {name: to_builtins(value) for name, value in self._arguments().items()}

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that make an equal edit, without those that are absent."""
        values = zip(ARGUMENTS, _VALUES(self), strict=True)
        return {name: value for name, value in values if id(value) not in _ABSENT}

    def _content(self) -> tuple[object, ...]:
        return tuple((v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in _VALUES(self))

    def __repr__(self) -> str:
        return f"Edit({', '.join(f'{name}={_summary(value)}' for name, value in self._arguments().items())})"


_TYPES = get_type_hints(Edit, include_extras=True)
EditForm: Any = form_of(Edit)
"""JSON form of an edit."""
ARGUMENTS: tuple[str, ...] = EditForm.__struct_fields__
_VALUES = attrgetter(*ARGUMENTS)
_ABSENT = frozenset(map(id, (None, (), _NO_VECTOR)))
_READ = ("strength", "dose", "low", "high", "sae", "feature", "set", "add", "live")
_READERS = {name: reader(_TYPES[name]) for name in _READ}


def _summary(value: object) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    return f"<float32{list(value.shape)}, norm {float(np.linalg.norm(value.astype(np.float64))):.4g}>"


def _read_rows(value: Any, kind: EditKind, point: str, layers: Layers, tokens: Any) -> tuple[Vector, Any]:
    """Return the vector or matrix of an edit, and its tokens, which rows of a capture decide about."""
    refuse_names(value, takes_matrix=kind.takes_matrix)
    if is_captured(value):
        if not kind.takes_matrix:
            raise SteeringError("vector", f"is a capture, which {kind.name} does not take; use replace")
        value, tokens = rows_of(value, point, layers, tokens)
    if kind.takes_matrix and is_matrix(value):
        return parse_matrix(value), tokens
    vector = parse_vector(value)
    if kind.needs_direction and not vector.any():
        raise SteeringError(
            "vector", f"is zero in float32; {kind.name} ({kind.formula}) needs a vector with a direction"
        )
    return vector, tokens

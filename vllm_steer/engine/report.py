# SPDX-License-Identifier: Apache-2.0
"""Report of what a model or an engine supports, for ``vllm-steer doctor`` and ``GET /v1/steering/capabilities``.

The facts come from the workers or from :mod:`vllm_steer.models.dry_run`. Names, formulas, reasons and limits come from
the tables that the code itself uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_steer._version import __version__
from vllm_steer.compat.version import CONFLICTS, TESTED_RANGE, compare_installed, is_tested
from vllm_steer.config import SteeringConfig
from vllm_steer.limits import ENGINE_LIMITS
from vllm_steer.models.centring import merge_centring
from vllm_steer.models.proofs import own_proofs, proofs_of
from vllm_steer.points import BRANCH_OUTPUTS, POINTS, POINTS_FLAG, Point
from vllm_steer.request import KINDS

_OWN_FACTS = (
    "problem", "examined", "num_layers", "hidden_size", "max_model_len", "dtype", "logprobs_mode", "mixed_head",
    "unproven", "no_plain_code", "self_checks",
)  # fmt: skip
"""Facts that a report repeats under their own names."""


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PointReport(_Report):
    """One hook point on this model."""

    name: str
    value: str
    seen_by: str
    names_elsewhere: dict[str, str]
    """Names of the same value in other libraries; ``i`` is the layer."""
    switched_on_by: str | None = Field(description="Flag that enables the point, or null.")
    on: bool = Field(description="Whether the point is enabled.")
    edits: bool = Field(description="Whether every layer can be edited.")
    reads: bool = Field(description="Whether every layer can be captured.")
    refused: dict[int, str]
    """Reasons why layers cannot be edited."""
    unread: dict[int, str]
    """Reasons why layers cannot be captured."""
    altered: list[int] = Field(
        default=[],
        description="Layers in which the module of this branch returns something else than it adds to the stream.",
    )


class RecipeReport(_Report):
    """Tap positions in the layers of one class."""

    layer_class: str
    layers: list[int]
    stream: str
    """``pair``: the stream is the sum of two tensors; ``single``: one tensor; ``the mean of several`` and the like: one
    of several streams, or what is computed from them."""
    post_attn_in_front_of: str | None
    """Submodule that consumes the stream after attention, or None."""


class ProofReport(_Report):
    """A conformance test result for this architecture or its layer class."""

    architecture: str
    vllm: str
    """Version of vLLM that ran it."""
    kind: str
    value_error: float | None
    cause_error: float | None
    dtype: str
    """Dtype in which the errors were measured."""


class ConflictReport(_Report):
    """A setting of vLLM that conflicts with steering."""

    setting: str
    reason: str
    present: bool


class CapabilityReport(_Report):
    """Capabilities of a model or an engine. Sizes in bytes are per rank."""

    vllm_steer: str = __version__
    vllm: str
    vllm_tested: str = TESTED_RANGE
    vllm_is_tested: bool
    vllm_check: str | None = Field(
        default=None, description="For an untested vLLM: what was compared with the tested versions, and the result."
    )
    architecture: str | None
    """Architecture in the model's configuration."""
    model_class: str | None
    """Class of the model in vLLM."""
    problem: str | None = None
    """Reason why the model is not supported, or None."""
    examined: bool = Field(
        default=True,
        description="False if vLLM could not build the model on this machine, for the reason in `problem`. It may be "
        "supported elsewhere; `proofs` then lists the proofs of its architecture.",
    )
    num_layers: int | None = None
    hidden_size: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    logprobs_mode: str | None = Field(
        default=None,
        description="What the engine returns as log-probabilities (vLLM's setting); null without an engine.",
    )
    points: list[PointReport] = []
    mixed_head: str | None = Field(
        default=None, description="Reason why the final norm does not read the stream of the points alone, or null."
    )
    edits: dict[str, str] = Field(default={}, description="Formula of each kind of edit.")
    no_capture: str | None = None
    """Reason why nothing can be captured, or None."""
    recipes: list[RecipeReport] = []
    unproven: list[str] = []
    """How layer classes differ from the proven ones, if the user allowed them."""
    proofs: list[ProofReport] = []
    conflicts: list[ConflictReport] = []
    limits: dict[str, int] = {}
    table_bytes: dict[str, int] = {}
    plain_code: bool | None = Field(
        default=None,
        description="Whether steps without edits and captures run the model without its taps; null without an engine.",
    )
    no_plain_code: str | None = Field(default=None, description="Reason why they run it with its taps, or null.")
    self_checks: list[dict[str, Any]] = []
    """Results of the self-check at start, by rank; empty without an engine."""


def merge_facts(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the facts of all ranks into the facts of the model. A pipeline stage reports its own layers."""
    recipes: dict[tuple[str, str, str | None], dict[str, Any]] = {}
    for recipe in (recipe for rank in ranks for recipe in rank.get("recipes", [])):
        merged = recipes.setdefault((recipe["layer"], recipe["stream"], recipe["mid"]), {**recipe, "layers": []})
        merged["layers"] = sorted({*merged["layers"], *recipe["layers"]})

    def first(name: str) -> Any:
        return next((rank[name] for rank in ranks if rank.get(name)), None)

    return {
        **ranks[0],
        "recipes": list(recipes.values()),
        "unproven": sorted({reason for rank in ranks for reason in rank.get("unproven", [])}),
        "self_checks": [rank["self_check"] for rank in ranks if "self_check" in rank],
        "no_lens": first("no_lens"),
        "altered": {
            point: sorted({layer for rank in ranks for layer in rank.get("altered", {}).get(point, ())})
            for point in BRANCH_OUTPUTS
        },
        "mixed_head": first("mixed_head"),
        "centring": merge_centring([rank.get("centring", "unknown") for rank in ranks]),
        "no_plain_code": first("no_plain_code"),
    }


def make_report(facts: Mapping[str, Any], config: SteeringConfig, *, no_capture: str | None = None) -> CapabilityReport:
    """Return the report of a model.

    Args:
        facts: Merged facts of an engine's workers, or the facts of a dry run.
        config: Limits of the engine.
        no_capture: Reason why nothing can be captured, or None.
    """
    refused, unread = (
        {point: {int(n): why for n, why in by.items()} for point, by in facts.get(key, {}).items()}
        for key in ("refused", "unread")
    )
    recipes = [
        RecipeReport(
            layer_class=recipe["layer"],
            layers=recipe["layers"],
            stream=recipe["stream"],
            post_attn_in_front_of=recipe["mid"],
        )
        for recipe in facts.get("recipes", [])
    ]
    supported, examined = facts.get("problem") is None, facts.get("examined", True)
    architecture = facts.get("architecture")
    proofs = (
        proofs_of(architecture, [recipe.layer_class for recipe in recipes]) if examined else own_proofs(architecture)
    )

    def enabled(point: Point) -> bool:
        return not point.optional or point.name in config.points

    return CapabilityReport(
        vllm=facts["vllm"],
        vllm_is_tested=is_tested(facts["vllm"]),
        vllm_check=None if is_tested(facts["vllm"]) else str(compare_installed(facts["vllm"])),
        architecture=architecture,
        model_class=facts.get("model_class"),
        points=[
            PointReport(
                name=point.name,
                value=point.identity,
                seen_by=point.seen_by,
                names_elsewhere=dict(point.aliases),
                switched_on_by=f"{POINTS_FLAG} {point.name}" if point.optional else None,
                on=enabled(point),
                edits=enabled(point) and not refused.get(point.name),
                reads=enabled(point) and not unread.get(point.name) and no_capture is None,
                refused=refused.get(point.name, {}),
                unread=unread.get(point.name, {}),
                altered=list(facts.get("altered", {}).get(point.name, ())),
            )
            for point in POINTS.values()
        ]
        if supported
        else [],
        edits={kind.name: kind.formula for kind in KINDS.values()} if supported else {},
        no_capture=no_capture,
        recipes=recipes,
        proofs=[
            ProofReport(
                architecture=p.architecture,
                vllm=p.vllm,
                kind=p.proof,
                value_error=p.value,
                cause_error=p.cause,
                dtype=p.dtype,
            )
            for p in proofs
        ],
        conflicts=[
            ConflictReport(setting=c.setting, reason=c.reason, present=c.setting in facts.get("conflicts", []))
            for c in CONFLICTS
        ],
        limits={name: getattr(config, name) for name in ENGINE_LIMITS},
        table_bytes=dict(facts.get("tables", {})),
        plain_code=facts.get("no_plain_code") is None if facts.get("self_checks") else None,
        **{name: facts[name] for name in _OWN_FACTS if name in facts},
    )

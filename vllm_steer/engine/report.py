# SPDX-License-Identifier: Apache-2.0
"""What a model or an engine serves, as one report: ``vllm-steer doctor`` and ``GET /v1/steering/capabilities`` give it.

The facts come from a worker, or from :mod:`vllm_steer.models.outline`, in builtins; names, formulas, reasons and limits
from the tables in which the code has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_steer._version import __version__
from vllm_steer.compat.version import CONFLICTS, TESTED_RANGE, is_tested
from vllm_steer.config import SteeringConfig
from vllm_steer.limits import ENGINE_LIMITS
from vllm_steer.models.proofs import proofs_of
from vllm_steer.points import POINTS, POINTS_FLAG, Point
from vllm_steer.spec import KINDS


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PointReport(_Part):
    """One hook point on this model."""

    name: str
    value: str
    seen_by: str
    names_elsewhere: dict[str, str]
    """The same value in other libraries, ``i`` being the layer."""
    switched_on_by: str | None = Field(description="The flag without which the engine has no such point.")
    on: bool = Field(description="Whether this engine has it.")
    edits: bool = Field(description="Whether it is edited on every layer.")
    reads: bool = Field(description="Whether it is read on every layer.")
    refused: dict[int, str]
    """The reason, by layer, where it is not edited."""
    unread: dict[int, str]
    """The reason, by layer, where it is not read."""


class RecipeReport(_Part):
    """How the layers of one class are reached."""

    layer_class: str
    layers: list[int]
    stream: str
    """``pair``: two summands, ``single``: one tensor."""
    post_attn_in_front_of: str | None
    """The submodule that consumes the stream after attention; None where there is no such place."""


class ProofReport(_Part):
    """A model of the conformance tests that stands for this one."""

    architecture: str
    kind: str
    value_error: float | None
    cause_error: float | None
    dtype: str
    """In which the two were measured."""


class ConflictReport(_Part):
    """A setting of vLLM that steering does not go with."""

    setting: str
    reason: str
    present: bool


class CapabilityReport(_Part):
    """All that can be said ahead of a request. Bytes are those of one rank."""

    vllm_steer: str = __version__
    vllm: str
    vllm_tested: str = TESTED_RANGE
    vllm_is_tested: bool
    architecture: str | None
    """As the model's own configuration names it."""
    model_class: str | None
    """What vLLM runs for it."""
    problem: str | None = None
    """Why the model is not served at all."""
    num_layers: int | None = None
    hidden_size: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    points: list[PointReport] = []
    edits: dict[str, str] = Field(default={}, description="Kind of edit to its formula.")
    no_capture: str | None = None
    """Why nothing is read at all."""
    recipes: list[RecipeReport] = []
    unproven: list[str] = []
    """Why layer classes are not the ones that were proven; the user allowed them."""
    proofs: list[ProofReport] = []
    conflicts: list[ConflictReport] = []
    limits: dict[str, int] = {}
    table_bytes: dict[str, int] = {}
    self_checks: list[dict[str, Any]] = []
    """What the check of the taps at start found, rank by rank; none where no engine runs."""


def merge_facts(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One model's facts from its ranks' own: tensor-parallel ranks say the same, pipeline stages know their layers."""
    recipes: dict[tuple[str, str, str | None], dict[str, Any]] = {}
    for recipe in (recipe for rank in ranks for recipe in rank.get("recipes", [])):
        about = recipes.setdefault((recipe["layer"], recipe["stream"], recipe["mid"]), {**recipe, "layers": []})
        about["layers"] = sorted({*about["layers"], *recipe["layers"]})
    return {
        **ranks[0],
        "recipes": list(recipes.values()),
        "unproven": sorted({doubt for rank in ranks for doubt in rank.get("unproven", [])}),
        "self_checks": [rank["self_check"] for rank in ranks if "self_check" in rank],
    }


def make_report(facts: Mapping[str, Any], config: SteeringConfig, *, no_capture: str | None = None) -> CapabilityReport:
    """The report of ``facts``: those of the workers of an engine, merged, or of an outline of a model."""
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
    served = facts.get("problem") is None

    def on(point: Point) -> bool:
        return not point.optional or point.name in config.points

    return CapabilityReport(
        vllm=facts["vllm"],
        vllm_is_tested=is_tested(facts["vllm"]),
        architecture=facts.get("architecture"),
        model_class=facts.get("model_class"),
        problem=facts.get("problem"),
        num_layers=facts.get("num_layers"),
        hidden_size=facts.get("hidden_size"),
        max_model_len=facts.get("max_model_len"),
        dtype=facts.get("dtype"),
        points=[
            PointReport(
                name=point.name,
                value=point.identity,
                seen_by=point.seen_by,
                names_elsewhere=dict(point.aliases),
                switched_on_by=f"{POINTS_FLAG} {point.name}" if point.optional else None,
                on=on(point),
                edits=on(point) and not refused.get(point.name),
                reads=on(point) and not unread.get(point.name) and no_capture is None,
                refused=refused.get(point.name, {}),
                unread=unread.get(point.name, {}),
            )
            for point in POINTS.values()
        ]
        if served
        else [],
        edits={kind.name: kind.formula for kind in KINDS.values()} if served else {},
        no_capture=no_capture,
        recipes=recipes,
        unproven=list(facts.get("unproven", [])),
        proofs=[
            ProofReport(
                architecture=p.architecture, kind=p.proof, value_error=p.value, cause_error=p.cause, dtype=p.dtype
            )
            for p in proofs_of(facts.get("architecture"), [recipe.layer_class for recipe in recipes])
        ],
        conflicts=[
            ConflictReport(setting=c.setting, reason=c.reason, present=c.setting in facts.get("conflicts", []))
            for c in CONFLICTS
        ],
        limits={name: getattr(config, name) for name in ENGINE_LIMITS},
        table_bytes=dict(facts.get("tables", {})),
        self_checks=list(facts.get("self_checks", [])),
    )

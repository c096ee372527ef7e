# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of request bodies and response fields, for the OpenAPI document.

They derive from the forms in :mod:`vllm_steer.spec`. The parsers in ``spec/`` and ``registry/`` validate the bodies.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from vllm_steer.registry.schema import SteeringApplied
from vllm_steer.spec.json_schema import Schema, json_schema
from vllm_steer.spec.references import NAME_RULE, ReferencesForm
from vllm_steer.spec.request_form import (
    EditsForm,
    VectorsForm,
    request_schemas,
    vectors_added_to,
)
from vllm_steer.spec.vector import VectorForm

JSON = "application/json"
BINARY = ("application/octet-stream", "application/safetensors")


class SteeringForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Edits by the tokens that they apply to."""

    base: Annotated[VectorsForm, vectors_added_to("every token")] | msgspec.UnsetType = msgspec.UNSET
    prefill: Annotated[VectorsForm, vectors_added_to("prompt tokens")] | msgspec.UnsetType = msgspec.UNSET
    decode: Annotated[VectorsForm, vectors_added_to("generated tokens")] | msgspec.UnsetType = msgspec.UNSET
    edits: EditsForm | msgspec.UnsetType = msgspec.UNSET


class ModuleForm(SteeringForm, kw_only=True, forbid_unknown_fields=True):
    """A module to register."""

    name: Annotated[str, msgspec.Meta(description=f"Name in requests: {NAME_RULE}.")]
    probes: (
        Annotated[dict[str, VectorForm], msgspec.Meta(min_length=1, description="Directions for projections, by name.")]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    description: Annotated[str | None, msgspec.Meta(description="Free text.")] = None
    model: Annotated[str | None, msgspec.Meta(description="The model that the vectors were made for.")] = None
    provenance: Annotated[dict[str, str] | None, msgspec.Meta(description="Where the vectors come from.")] = None


class GlobalSteeringForm(SteeringForm, kw_only=True, forbid_unknown_fields=True):
    """Global steering to set."""

    modules: (
        Annotated[
            ReferencesForm,
            msgspec.Meta(
                description="Registered modules, at their current versions; they apply first. Forms: `name`, "
                "`name@sha256:...`, `sha256:...`, or a pair of such a reference and a scale."
            ),
        ]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    replace: Annotated[
        bool | None,
        msgspec.Meta(
            description="Clear everything that is not named. Otherwise a vector replaces the one of its site in that "
            "tier, and `edits` and `modules` replace all previous ones."
        ),
    ] = False


REQUEST_FIELDS: dict[str, Schema] = request_schemas()
"""Schemas of the fields of completion, chat and responses bodies, by name."""

_APPLIED = SteeringApplied.model_json_schema(ref_template="#/components/schemas/{model}")
ANSWER_FIELDS: dict[str, Schema] = {
    "steering_applied": {key: value for key, value in _APPLIED.items() if key != "$defs"},
}
"""Schemas of the fields added to responses, by name."""


def _body(form: type[msgspec.Struct], **binary: Schema) -> Schema:
    return {"required": True, "content": {JSON: {"schema": json_schema(form)}, **binary}}


MODULE_BODY: Schema = _body(
    ModuleForm,
    **{
        kind: {"schema": {"type": "string", "format": "binary", "description": "A module's safetensors file."}}
        for kind in BINARY
    },
)
SET_BODY: Schema = _body(GlobalSteeringForm)

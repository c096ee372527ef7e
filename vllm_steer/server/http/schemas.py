# SPDX-License-Identifier: Apache-2.0
"""The form of bodies, as JSON schemas for the OpenAPI document. ``spec/`` and ``registry/`` decide what is right."""

from __future__ import annotations

from typing import Any

from vllm_steer.limits import MAX_REFERENCES, MAX_WIDTH
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES, POINTS_FLAG
from vllm_steer.registry.schema import SteeringApplied
from vllm_steer.spec import KINDS
from vllm_steer.spec.references import NAME_RULE
from vllm_steer.spec.vector import PACKED_DTYPES

JSON = "application/json"
BINARY = ("application/octet-stream", "application/safetensors")

Schema = dict[str, Any]

PACKED: Schema = {
    "type": "object",
    "description": "A packed vector: its components in little-endian order, base64-encoded.",
    "properties": {
        "dtype": {"enum": list(PACKED_DTYPES), "description": "Type of the components."},
        "shape": {"type": "array", "items": {"type": "integer"}, "description": "`[H]`, the model's hidden size."},
        "data": {"type": "string", "description": "The bytes (RFC 4648, with padding, without line breaks)."},
    },
    "required": ["dtype", "shape", "data"],
    "additionalProperties": False,
}
VECTOR: Schema = {
    "description": "A vector of the model's hidden size.",
    "anyOf": [{"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": MAX_WIDTH}, PACKED],
}
SCALED: Schema = {
    "type": "object",
    "description": "A vector and what it is multiplied by.",
    "properties": {"vector": VECTOR, "scale": {"type": "number", "default": 1.0, "description": "The factor."}},
    "required": ["vector"],
    "additionalProperties": False,
}
LAYERS: Schema = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,3})$"},
    "additionalProperties": {"anyOf": [VECTOR, SCALED]},
    "description": "By layer, counted from 0 over the whole model.",
}


def vectors(tokens: str) -> Schema:
    """The short form, of vectors added to some tokens."""
    return {
        "type": "object",
        "minProperties": 1,
        "properties": dict.fromkeys(POINT_NAMES, LAYERS),
        "additionalProperties": False,
        "description": f"Vectors added to the residual stream of {tokens}, by hook point and layer.",
    }


TOKENS: Schema = {
    "description": "Which tokens: a name, or a list of positions and `[start, stop]` pairs, a stop of null for no end; "
    "negative positions count back from the end of the prompt.",
    "default": "all",
    "anyOf": [
        {"enum": ["all", "prompt", "generated", "last_prompt"]},
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "integer"}, {"type": "array"}]}},
    ],
}
EDIT: Schema = {
    "type": "object",
    "description": "One edit.",
    "properties": {
        "kind": {
            "enum": list(KINDS),
            "description": "New value of a row x, u being the vector's direction and s the strength: "
            + "; ".join(f"`{kind.name}`: {kind.formula}" for kind in KINDS.values())
            + ".",
        },
        "point": {
            "enum": list(POINT_NAMES),
            "description": f"Hook point; {', '.join(OPTIONAL_POINTS)} need {POINTS_FLAG}.",
        },
        "layers": {
            "description": 'One layer, a list of them, or "all".',
            "anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}, {"const": "all"}],
        },
        "vector": VECTOR,
        "strength": {"type": "number", "default": 1.0, "description": "Multiplies the edit."},
        "tokens": TOKENS,
        "low": {"type": ["number", "null"], "description": "`clamp`: lowest projection on the direction."},
        "high": {"type": ["number", "null"], "description": "`clamp`: highest projection on the direction."},
    },
    "required": ["kind", "point", "layers", "vector"],
    "additionalProperties": False,
}
EDITS: Schema = {
    "type": "array",
    "items": EDIT,
    "minItems": 1,
    "description": "Edits of any kind, in the order in which they apply.",
}
REFERENCES: Schema = {
    "type": "array",
    "maxItems": MAX_REFERENCES,
    "description": "Registered modules: `name`, `name@sha256:...`, `sha256:...`, or a pair of one of them and a scale "
    "that multiplies the strength of each of its edits.",
    "items": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 2, "maxItems": 2}]},
}
CAPTURE: Schema = {
    "type": "object",
    "minProperties": 1,
    "description": "Which rows of the residual stream go where, by consumer.",
    "additionalProperties": {
        "type": "object",
        "description": "What one consumer gets; other keys are its own options.",
        "properties": {
            "hooks": {
                "type": "object",
                "description": 'Layers by hook point: a number, a list of them, or "all".',
            },
            "positions": {
                "description": "`last_prompt`, `all_prompt`, `all_generated`, `all`, or a list as of an edit's tokens.",
                "default": "last_prompt",
            },
            "before": {"type": "boolean", "default": False, "description": "Read ahead of the point's own edits."},
            "dtype": {"enum": ["float32", "float16", "bfloat16", None], "description": "What rows are converted to."},
            "reduce": {
                "description": "`mean` or `last` of a site's rows, or projections on directions: "
                "`{directions: [[...]]}` or, of registered modules, `{probes: [module/probe]}`."
            },
        },
        "required": ["hooks"],
    },
}

# The fields of completion bodies, by name.
REQUEST_FIELDS: dict[str, Schema] = {
    "steering_vectors": vectors("every token"),
    "prefill_steering_vectors": vectors("prompt tokens"),
    "decode_steering_vectors": vectors("generated tokens"),
    "steering": EDITS,
    "steering_modules": {**REFERENCES, "minItems": 1},
    "capture": CAPTURE,
}
_APPLIED = SteeringApplied.model_json_schema(ref_template="#/components/schemas/{model}")
ANSWER_FIELDS: dict[str, Schema] = {
    "steering_applied": {key: value for key, value in _APPLIED.items() if key != "$defs"},
}

_TIERS: dict[str, Schema] = {
    "base": vectors("every token"),
    "prefill": vectors("prompt tokens"),
    "decode": vectors("generated tokens"),
    "edits": EDITS,
}


def _body(properties: dict[str, Schema], required: list[str], **binary: Schema) -> Schema:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = required
    return {"required": True, "content": {JSON: {"schema": schema}, **binary}}


MODULE_BODY: Schema = _body(
    {
        "name": {"type": "string", "description": f"What requests call it: {NAME_RULE}."},
        **_TIERS,
        "probes": {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": VECTOR,
            "description": "Directions to read by, by name.",
        },
        "description": {"type": ["string", "null"], "description": "Free text."},
        "model": {"type": ["string", "null"], "description": "The model that the vectors were made for."},
        "provenance": {
            "type": ["object", "null"],
            "additionalProperties": {"type": "string"},
            "description": "Where the vectors come from.",
        },
    },
    ["name"],
    **{
        kind: {"schema": {"type": "string", "format": "binary", "description": "A module's safetensors file."}}
        for kind in BINARY
    },
)
SET_BODY: Schema = _body(
    {
        **_TIERS,
        "modules": {**REFERENCES, "description": REFERENCES["description"] + " They apply as they are now, first."},
        "replace": {
            "type": ["boolean", "null"],
            "default": False,
            "description": "Clear everything that is not named. Else a vector takes the place of what its site had in "
            "that tier, and `edits` and `modules` of what these were.",
        },
    },
    [],
)

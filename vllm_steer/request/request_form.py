# SPDX-License-Identifier: Apache-2.0
"""JSON form of the fields that a request may have.

The types of the fields are declared beside their checks (:mod:`vllm_steer.request.field_types`). The OpenAPI document
and docs/reference derive from their JSON Schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec

from vllm_steer.limits import MAX_EXPRESSION_CHARS, MAX_READOUTS, MAX_STOPS
from vllm_steer.points import POINT_NAMES
from vllm_steer.request.capture import CaptureForm
from vllm_steer.request.condition import Stop
from vllm_steer.request.edit import EditForm
from vllm_steer.request.field_types import Schema, any_of, json_schema
from vllm_steer.request.readout import Readout
from vllm_steer.request.references import ReferencesForm
from vllm_steer.request.vector import VectorForm

LAYER_KEY_PATTERN = "^(0|[1-9][0-9]{0,3})$"


class ScaledVector(msgspec.Struct, forbid_unknown_fields=True):
    """A vector and a factor that multiplies it."""

    vector: VectorForm
    scale: Annotated[float, msgspec.Meta(description="The factor.")] = 1.0


VectorsByLayer = Annotated[
    dict[Annotated[str, msgspec.Meta(pattern=LAYER_KEY_PATTERN)], Annotated[Any, any_of(VectorForm, ScaledVector)]],
    msgspec.Meta(min_length=1, description="Vectors by layer; layers count from 0 over the whole model."),
]
VectorsForm = Annotated[
    dict[str, VectorsByLayer],
    msgspec.Meta(min_length=1, extra_json_schema={"propertyNames": {"examples": list(POINT_NAMES)}}),
]
"""Vectors to add, by hook point and layer."""
EditsForm = Annotated[
    Any,
    any_of(
        Annotated[list[Annotated[Any, any_of(EditForm)]], msgspec.Meta(min_length=1)],
        Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_EXPRESSION_CHARS)],
    ),
    msgspec.Meta(
        description="Edits of any kind, in the order in which they apply. Over HTTP, also an expression such as "
        "`0.7 calm@answer - 0.3 formal`, whose numbers are doses and whose names are registered modules."
    ),
]


def vectors_added_to(tokens: str) -> msgspec.Meta:
    """Return the description of a field with vectors."""
    return msgspec.Meta(description=f"Vectors added to the residual stream of {tokens}, by hook point and layer.")


class RequestForm(msgspec.Struct, kw_only=True):
    """Fields of completion, chat and responses bodies, and arguments of ``SamplingParams``."""

    steering_vectors: Annotated[VectorsForm, vectors_added_to("every token")]
    prefill_steering_vectors: Annotated[VectorsForm, vectors_added_to("prompt tokens")]
    decode_steering_vectors: Annotated[VectorsForm, vectors_added_to("generated tokens")]
    steering: EditsForm
    steering_modules: Annotated[ReferencesForm, msgspec.Meta(min_length=1)]
    capture: Annotated[
        dict[str, Annotated[Any, any_of(CaptureForm)]],
        msgspec.Meta(min_length=1, description="Rows of the residual stream to capture, by consumer."),
    ]
    readouts: Annotated[
        dict[str, Readout],
        msgspec.Meta(
            min_length=1,
            max_length=MAX_READOUTS,
            description="Numbers computed from the stream at one site for each token, by name.",
        ),
    ]
    stop_on: Annotated[
        list[Stop],
        msgspec.Meta(
            min_length=1, max_length=MAX_STOPS, description="Conditions on readouts, any of which ends generation."
        ),
    ]


GENERAL_NAMES: Mapping[str, type] = MappingProxyType(
    {name: get_origin(kind) for name, kind in get_type_hints(RequestForm).items() if "steering" not in name}
)
"""Fields whose names may have another meaning inside other objects, with the type that the value of ours has."""


def request_schemas() -> dict[str, Schema]:
    """Return the JSON Schema of each request field."""
    schemas: dict[str, Schema] = json_schema(RequestForm)["properties"]
    return schemas

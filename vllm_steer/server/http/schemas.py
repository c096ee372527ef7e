# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of request bodies and response fields, and these fields in vLLM's OpenAPI document.

They derive from the forms in :mod:`vllm_steer.request`. A field of a request is declared in
``request/request_form.py``, not here. The parsers in ``request/`` and ``registry/`` validate the bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI

from vllm_steer.patching.request import StudyForm
from vllm_steer.registry.schema import ModuleUse, NoEffect, SteeringApplied
from vllm_steer.request.field_types import Schema, any_of, json_schema
from vllm_steer.request.probe import Probe
from vllm_steer.request.references import NAME_RULE, ReferencesForm
from vllm_steer.request.request_form import (
    EditsForm,
    VectorsForm,
    request_schemas,
    vectors_added_to,
)
from vllm_steer.request.vector import VectorForm
from vllm_steer.server.http.capture_reports import RESULTS_FIELD
from vllm_steer.server.http.readout_feed import READOUTS_KEY, TRACE_KEY
from vllm_steer.server.http.request_context import ResultsLocation

ABSENT: Any = msgspec.UNSET
"""Default of a field that may be absent."""
JSON = "application/json"
BINARY = ("application/octet-stream", "application/safetensors")


class SteeringForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Edits by the tokens that they apply to."""

    base: Annotated[VectorsForm, vectors_added_to("every token")] = ABSENT
    prefill: Annotated[VectorsForm, vectors_added_to("prompt tokens")] = ABSENT
    decode: Annotated[VectorsForm, vectors_added_to("generated tokens")] = ABSENT
    edits: EditsForm = ABSENT


class ModuleForm(SteeringForm, kw_only=True, forbid_unknown_fields=True):
    """A module to register."""

    name: Annotated[str, msgspec.Meta(description=f"Name in requests: {NAME_RULE}.")]
    probes: Annotated[
        dict[str, Annotated[Any, any_of(VectorForm, Probe)]],
        msgspec.Meta(min_length=1, description="Probes by name: directions, or probes as they are read."),
    ] = ABSENT
    description: Annotated[str | None, msgspec.Meta(description="Free text.")] = None
    model: Annotated[str | None, msgspec.Meta(description="The model that the vectors were made for.")] = None
    provenance: Annotated[dict[str, str] | None, msgspec.Meta(description="Where the vectors come from.")] = None


class GlobalSteeringForm(SteeringForm, kw_only=True, forbid_unknown_fields=True):
    """Global steering to set."""

    modules: Annotated[
        ReferencesForm,
        msgspec.Meta(
            description="Registered modules, at their current versions; they apply first. Forms: `name`, "
            "`name@sha256:...`, `sha256:...`, or a pair of such a reference and a scale."
        ),
    ] = ABSENT
    replace: Annotated[
        bool | None,
        msgspec.Meta(
            description="Clear everything that is not named. Otherwise a vector replaces the one of its site in that "
            "part, and `edits` and `modules` replace all previous ones."
        ),
    ] = False


class SiteRowsForm(msgspec.Struct):
    """Captured rows of one site."""

    positions: Annotated[list[int], msgspec.Meta(description="Position of each row.")]
    dtype: Annotated[str, msgspec.Meta(description="Type of the numbers, such as `float32`.")]
    shape: Annotated[list[int], msgspec.Meta(description="Shape of the rows; the first number counts the rows.")]
    data: Annotated[str, msgspec.Meta(description="The rows: base64 of the little-endian bytes, row-major.")]


class CaptureReportForm(msgspec.Struct):
    """Report of one consumer for one choice."""

    status: Annotated[Literal["ok", "partial", "error"], msgspec.Meta(description="Whether all rows are present.")]
    error: Annotated[str | None, msgspec.Meta(description="Reason for a status other than `ok`.")]
    unreached: Annotated[
        list[int | list[int | None]],
        msgspec.Meta(
            description="Positions and `[start, stop]` pairs of the spec that the request ended before, if any."
        ),
    ] = ABSENT
    sites: Annotated[
        dict[str, dict[str, SiteRowsForm]],
        msgspec.Meta(description="Rows by hook point and layer, if they are small enough for the response."),
    ] = ABSENT
    data: Annotated[Any, msgspec.Meta(description="The consumer's own report, if it is not `memory`.")] = ABSENT
    id: Annotated[str, msgspec.Meta(description="Id for `GET /v1/captures/{id}`, if rows or report are larger.")] = (
        ABSENT
    )
    bytes: Annotated[int, msgspec.Meta(description="With `id`: size of the file.")] = ABSENT
    format: Annotated[Literal["safetensors", "json"], msgspec.Meta(description="With `id`: format of the file.")] = (
        ABSENT
    )
    expires_in: Annotated[int, msgspec.Meta(description="With `id`: seconds until the file is deleted.")] = ABSENT


class ReadoutValuesForm(msgspec.Struct):
    """Values of one readout."""

    positions: Annotated[
        list[int], msgspec.Meta(description="Positions in the prompt and the generated tokens together, from 0.")
    ]
    values: Annotated[
        Any,
        any_of(list[float | None], list[list[float | None]]),
        msgspec.Meta(
            description="A number per position of a probe, or a list per position of projections. Numbers that "
            "are not finite are null. With `indices`: the largest values first."
        ),
    ] = ABSENT
    indices: Annotated[
        list[list[int]], msgspec.Meta(description="`sae`: features by position; -1 if fewer are active.")
    ] = ABSENT
    token_ids: Annotated[list[list[list[int]]], msgspec.Meta(description="`lens`: tokens by position and layer.")] = (
        ABSENT
    )
    logprobs: Annotated[
        list[list[list[float | None]]],
        msgspec.Meta(description="`lens`, instead of `values`: log-probabilities of the tokens."),
    ] = ABSENT


class TraceForm(msgspec.Struct):
    """Factors of the gated and live edits at the generated tokens, or the reason why there are none."""

    positions: Annotated[list[int], msgspec.Meta(description="Positions of the generated tokens.")] = ABSENT
    gates: Annotated[
        list[list[float]],
        msgspec.Meta(description="By position: the factor of each edit with `when`, in their order."),
    ] = ABSENT
    live: Annotated[
        dict[str, list[float]], msgspec.Meta(description="Live strength in force by name and position.")
    ] = ABSENT
    controller_error: Annotated[
        str, msgspec.Meta(description="Why the controller failed, if it did; `live` does not change from then on.")
    ] = ABSENT
    error: Annotated[str, msgspec.Meta(description="Reason for a missing trace; the other fields are absent.")] = ABSENT


REQUEST_FIELDS: dict[str, Schema] = request_schemas()
"""Schemas of the fields of completion, chat and responses bodies, by name."""

_APPLIED = SteeringApplied.model_json_schema(ref_template="#/components/schemas/{model}")
ANSWER_FIELDS: dict[str, Schema] = {
    "steering_applied": {key: value for key, value in _APPLIED.items() if key != "$defs"},
    RESULTS_FIELD: {
        **json_schema(dict[str, CaptureReportForm]),
        "description": "Captures by consumer: of each choice, or at the top level of the responses API. A stream has "
        f"them in one more event: an object `{RESULTS_FIELD}` with `choices` before `[DONE]`, or an event of type "
        f"`{RESULTS_FIELD}` after `response.completed`.",
    },
    READOUTS_KEY: {
        **json_schema(dict[str, ReadoutValuesForm]),
        "description": "Readouts by name: of each choice, or at the top level of the responses API. In a stream, each "
        "event has the values of the tokens since the last event of its choice.",
    },
    TRACE_KEY: {
        **json_schema(TraceForm),
        "description": "Of requests with gated or live edits: of each choice, or at the top level of the responses "
        "API. In a stream, in the last event of the choice. If the server ran the model several times for server-side "
        "tools, it has only `error`.",
    },
}
"""Schemas of the fields added to responses, by name."""


def response_properties(results_in: ResultsLocation) -> dict[str, Schema]:
    """Return the schemas of the fields added to a response, with the results where the route has them."""
    if results_in == "response":
        return ANSWER_FIELDS
    by_choice = (RESULTS_FIELD, READOUTS_KEY, TRACE_KEY)
    choice = {"type": "object", "properties": {name: ANSWER_FIELDS[name] for name in by_choice}}
    others = {name: schema for name, schema in ANSWER_FIELDS.items() if name not in by_choice}
    return {**others, "choices": {"type": "array", "items": choice}}


def _body(form: type[msgspec.Struct], **binary: Schema) -> Schema:
    return {"required": True, "content": {JSON: {"schema": json_schema(form)}, **binary}}


MODULE_BODY: Schema = _body(
    ModuleForm,
    **{
        kind: {"schema": {"type": "string", "format": "binary", "description": "A module's or a vector file."}}
        for kind in BINARY
    },
)
SET_BODY: Schema = _body(GlobalSteeringForm)


class PatchForm(StudyForm, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A patching study, and options of the response."""

    model: Annotated[str | None, msgspec.Meta(description="The served model.")] = None
    stream: Annotated[bool, msgspec.Meta(description="Send the events `start`, `cell` and `summary`.")] = False
    return_file: Annotated[
        bool, msgspec.Meta(description="Add `file`: base64 of the safetensors file that `PatchingResult.load` reads.")
    ] = False


PATCH_BODY: Schema = _body(PatchForm)
STRENGTHS_BODY: Schema = {
    "required": True,
    "content": {
        JSON: {
            "schema": {
                **json_schema(dict[str, float]),
                "minProperties": 1,
                "description": "New factors by the names in `live` of the request's edits.",
            }
        }
    },
}

REQUESTS = ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest")
ROUTES: Mapping[str, ResultsLocation] = MappingProxyType(
    {"/v1/completions": "choices", "/v1/chat/completions": "choices", "/v1/responses": "response"}
)


def add_openapi_fields(app: FastAPI) -> None:
    """Add the fields to the requests and responses in ``/openapi.json``. A second call has no effect."""
    original: Callable[[], dict[str, Any]] = app.openapi
    if getattr(original, "_vllm_steer", False):
        return

    def openapi() -> dict[str, Any]:
        document = original()  # cached by FastAPI
        schemas = document.get("components", {}).get("schemas", {})
        for name in REQUESTS:
            schemas.get(name, {}).setdefault("properties", {}).update(REQUEST_FIELDS)
        for route, results_in in ROUTES.items():
            # vLLM documents only the media type of its responses.
            responses = document.get("paths", {}).get(route, {}).get("post", {}).get("responses", {})
            for body in responses.get("200", {}).get("content", {}).values():
                schema = body.setdefault("schema", {})
                properties = {**schema.get("properties", {}), **response_properties(results_in)}
                schema.update({"type": "object", "properties": properties})
        for part in (ModuleUse, NoEffect):
            schemas.setdefault(part.__name__, part.model_json_schema())
        return document

    openapi._vllm_steer = True  # type: ignore[attr-defined]
    app.openapi = openapi  # type: ignore[method-assign]

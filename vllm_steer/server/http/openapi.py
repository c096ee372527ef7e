# SPDX-License-Identifier: Apache-2.0
"""Steering and capture fields in the schemas of vLLM's OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI

from vllm_steer.registry.schema import ModuleUse, NoEffect
from vllm_steer.server.http.request_context import ResultsLocation
from vllm_steer.server.http.schemas import REQUEST_FIELDS, response_properties

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

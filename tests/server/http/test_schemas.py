# SPDX-License-Identifier: Apache-2.0
"""Schemas of the fields that responses have in the OpenAPI document."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from tests.server.http.answers import SPEC, captured, done, make_capturing_app
from vllm_steer.server.http.schemas import ROUTES, CaptureReportForm, add_openapi_fields

REPORTS = {
    "inline": done(captured()),
    "failed": done(None, "error", "the disk is full"),
    "own report": done({"path": "a.safetensors"}),
}


async def respond() -> None:
    """Handle a route whose response is not documented, like vLLM's."""


def test_openapi_document_has_response_fields() -> None:
    """Catches capture results that the document lacks or has at another place than the response."""
    app = FastAPI()
    for route in ROUTES:
        app.post(route)(respond)
    add_openapi_fields(app)
    paths = app.openapi()["paths"]
    for route in ROUTES:
        fields = paths[route]["post"]["responses"]["200"]["content"]["application/json"]["schema"]["properties"]
        holder = fields if route == "/v1/responses" else fields["choices"]["items"]["properties"]
        assert set(holder["capture_results"]["additionalProperties"]["properties"]) == set(
            CaptureReportForm.__struct_fields__
        )
        assert ("capture_results" in fields) == (route == "/v1/responses")
        assert "steering_applied" in fields


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("inline_kib", [0, 1024])
async def test_reports_have_the_documented_form(name: str, inline_kib: int) -> None:
    """Catches reports with fields or types other than documented."""
    app = make_capturing_app([{"memory": REPORTS[name]}])
    app.state.args.capture_inline_kib = inline_kib
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        response = await client.post("/v1/completions", json={"capture": {"memory": SPEC}})
    report: dict[str, Any] = response.json()["choices"][0]["capture_results"]["memory"]
    assert set(report) <= set(CaptureReportForm.__struct_fields__)
    msgspec.convert(report, CaptureReportForm)

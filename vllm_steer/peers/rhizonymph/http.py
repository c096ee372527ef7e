# SPDX-License-Identifier: Apache-2.0
"""Middleware that serves the fork's request fields and routes over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.types import Receive, Scope, Send

from vllm_steer.errors import SteeringError
from vllm_steer.peers.http import Translated, TranslatingMiddleware, with_path
from vllm_steer.peers.refusals import MODULE_FIELD, REFUSALS, refuse_names
from vllm_steer.peers.rhizonymph.fields import FIELDS, MODULE_FIELDS, translate_fields
from vllm_steer.peers.rhizonymph.packed import read_hooks
from vllm_steer.server.extension import CAPABILITIES, app_path

REQUESTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
PATHS: Mapping[tuple[str, str], str] = {
    ("GET", "/v1/steering"): "/v1/steering/set",
    ("GET", "/v1/steering/layers"): CAPABILITIES,
    ("POST", "/v1/steering/modules/register"): "/v1/steering/modules",
}
"""Our routes by method and path of the fork."""
SETTERS = ("/v1/steering/set", "/v1/steering/modules")
DYNAMIC = "/v1/steering/dynamic"
DYNAMIC_PROBLEM = SteeringError("dynamic", f"{DYNAMIC} is not supported; the gates of a request are in its answer")
CLAMPS = REFUSALS["rhizonymph"][MODULE_FIELD]
RESULTS = "capture_results"


class RhizonymphMiddleware(TranslatingMiddleware):
    """Translate bodies and paths, and add ``capture_results`` to the top of responses."""

    routes = (*REQUESTS, *SETTERS)
    refused: ClassVar = {DYNAMIC: DYNAMIC_PROBLEM}
    fields = (*FIELDS, *MODULE_FIELDS, *CLAMPS)
    rights: ClassVar = {name: "capture" if name.startswith("capture") else "steering" for name in FIELDS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = app_path(scope) if scope["type"] == "http" else ""
        ours = PATHS.get((scope.get("method", ""), path))
        if ours is not None:
            scope = with_path(scope, ours)
        await super().__call__(scope, receive, send)

    def require_rights(self, path: str, document: Mapping[str, Any]) -> None:
        """Check the rights that the fields of a request need; other routes have rights of their own."""
        if path in REQUESTS:
            super().require_rights(path, document)

    def translate(self, scope: Scope, path: str, document: Mapping[str, Any], limit: int) -> Translated:
        """Return a body with our fields, whose response gets ``capture_results`` at its top."""
        if path in SETTERS:
            return Translated(rename_vectors(document))
        fields = translate_fields(document)
        return Translated(fields, _add_results if "capture" in fields else None)


def rename_vectors(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body of ``/v1/steering/set`` or of a module with our names of the vector fields.

    Raises:
        SteeringError: A field is given by both names, or is invalid.
    """
    fields = dict(document)
    for theirs, ours in MODULE_FIELDS.items():
        if theirs in fields:
            if ours in fields:
                raise SteeringError(theirs, f"is the field {ours}, which is also given; send one of them")
            fields[ours] = fields.pop(theirs)
        if ours in fields:
            fields[ours] = read_hooks(fields[ours], ours)
    refuse_names((name for name, value in fields.items() if value is not None), CLAMPS)
    return {name: value for name, value in fields.items() if name not in CLAMPS}


async def _add_results(document: dict[str, Any]) -> None:
    """Add the capture results of the first choice to the top of a response, and file paths as ``payload``."""
    choices = document.get("choices") or [document]
    for choice in choices:
        for report in (choice.get(RESULTS) or {}).values():
            data = report.get("data")
            if isinstance(data, Mapping) and "path" in data:
                report["payload"] = [data["path"]]
    if RESULTS in choices[0]:
        document[RESULTS] = choices[0][RESULTS]

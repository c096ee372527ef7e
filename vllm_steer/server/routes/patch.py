# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/steering/patch`` and its alias ``POST /v1/patch_sweep``: patching studies on the server's engine.

Cells run at the lowest priority with ``--scheduling-policy priority``, and otherwise a few at one time. A study ends
when its client leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext
from vllm_steer.patching.answer import summary
from vllm_steer.patching.request import read_study
from vllm_steer.request.scalars import shown
from vllm_steer.server.auth.current_key import require
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.body_checks import LARGE_BODY, body_checks
from vllm_steer.server.http.schemas import JSON, PATCH_BODY
from vllm_steer.server.routes.base import (
    PATCH_SWEEP_ROUTE,
    RESPONSES,
    SteeringRoute,
    check_media_type,
    read_body,
    read_object,
    requires,
)
from vllm_steer.server.settings import max_body_bytes
from vllm_steer.server.studies import patch_sweep
from vllm_steer.server.studies.job import Results
from vllm_steer.server.studies.runner import EngineRunner
from vllm_steer.server.studies.service import StudyService

ROUTE = "/v1/steering/patch"
ALSO_KEY = "x-steering-also-right"
"""Field of a route in the OpenAPI document: a second right, which its handler requires."""
_ALSO = {ALSO_KEY: Right.CAPTURE.value}  # the grids depend on activations
_OPTIONS = ("model", "stream", "return_file")


def add_patch_routes(app: FastAPI, engine: Any, context: EngineContext) -> None:
    """Add the routes to a server with vLLM's ``AsyncLLM`` ``engine``."""
    args = getattr(app.state, "args", None)
    # The engine's configuration has the first name of `--served-model-name` only.
    given = getattr(args, "served_model_name", None) or ()
    service = StudyService(engine, context, [given] if isinstance(given, str) else given)
    app.include_router(make_router(service, max_body_bytes(args)))


def make_router(service: StudyService, max_body: int) -> APIRouter:
    """Return a router with the routes, which accept bodies of at most ``max_body`` bytes."""
    router = APIRouter(tags=["steering"], route_class=SteeringRoute, responses=RESPONSES)

    async def patch(request: Request) -> Response:
        """Run a patching study and return its grids.

        With `stream`, the response has the server-sent events `start`, `cell` (one for each cell) and `summary`. A cell
        that failed is null, with its reason in `failed`. The study ends when the client leaves.
        """
        body = await _read(request, max_body)
        options = {name: _flag(body, name) for name in _OPTIONS[1:]}
        service.check_model(body.get("model"))

        def start(runner: EngineRunner) -> Results:
            study, arguments = read_study(body, runner, _OPTIONS)
            return study.stream(**arguments)

        return await service.respond(
            request,
            start,
            lambda result: summary(result, with_file=options["return_file"]),
            stream=options["stream"],
        )

    async def sweep(request: Request) -> Response:
        """Run a patching study that is given in the fields of another project.

        The clean run is always measured. Runs that were stored earlier (`source_run`) are not served.
        """
        body = await _read(request, max_body)
        service.check_model(body.get("model"))
        return await service.respond(
            request,
            lambda runner: patch_sweep.start(body, runner),
            patch_sweep.summary,
            stream=_flag(body, "stream"),
        )

    router.add_api_route(
        ROUTE, patch, methods=["POST"], response_class=Response, summary="Run a patching study",
        openapi_extra=requires(Right.STEER, PATCH_BODY) | _ALSO,
    )  # fmt: skip
    router.add_api_route(
        PATCH_SWEEP_ROUTE, sweep, methods=["POST"], response_class=Response,
        summary="Run a patching study, with the field names of another project",
        openapi_extra=requires(Right.STEER) | _ALSO,
    )  # fmt: skip
    return router


async def _read(request: Request, max_body: int) -> Mapping[str, Any]:
    check_media_type(request, JSON)
    require(Right(_ALSO[ALSO_KEY]))
    text = await read_body(request, max_body)
    return read_object(text) if len(text) < LARGE_BODY else await body_checks().run(read_object, text)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise SteeringError(name, f"must be true or false, not {shown(value)}")
    return bool(value)

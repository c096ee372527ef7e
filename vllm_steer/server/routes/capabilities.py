# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/steering/capabilities``: what the running engine serves, and what it refuses and why.

A server without ``--enable-steering`` does not have the route.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from vllm_steer.engine.report import CapabilityReport, make_report
from vllm_steer.frontend.context import EngineContext
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.routes.base import RESPONSES, SteeringRoute, needs

ROUTE = "/v1/steering/capabilities"


def add_capabilities_route(app: FastAPI, served: EngineContext) -> None:
    """Add the route; its answer is made now, since nothing of it changes while the engine runs."""
    import vllm

    known = served.capabilities
    report = make_report({**known.facts, "vllm": vllm.__version__}, known.config, no_capture=known.no_capture)
    app.include_router(make_router(report))


def make_router(report: CapabilityReport) -> APIRouter:
    """The route that answers with ``report``."""
    router = APIRouter(tags=["steering"], route_class=SteeringRoute, responses=RESPONSES)

    async def capabilities() -> CapabilityReport:
        """What the running engine serves, and what it refuses and why."""
        return report

    summary = "Hook points, edits, limits and refusals"
    router.add_api_route(ROUTE, capabilities, methods=["GET"], summary=summary, openapi_extra=needs(Right.READ))
    return router

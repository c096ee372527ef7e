# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/steering/capabilities``: what the running engine supports, and what it refuses and why.

Servers without ``--enable-steering`` do not have this route.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from vllm_steer.engine.report import CapabilityReport
from vllm_steer.frontend.context import EngineContext
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.routes.base import RESPONSES, SteeringRoute, requires

ROUTE = "/v1/steering/capabilities"


def add_capabilities_route(app: FastAPI, engine: EngineContext) -> None:
    """Add the route. Its response is computed once, because it does not change while the engine runs."""
    app.include_router(make_router(engine.capabilities.report()))


def make_router(report: CapabilityReport) -> APIRouter:
    """Return a router whose route responds with ``report``."""
    router = APIRouter(tags=["steering"], route_class=SteeringRoute, responses=RESPONSES)

    async def capabilities() -> CapabilityReport:
        """Return the hook points, edits, limits and refusals of the running engine."""
        return report

    summary = "Hook points, edits, limits and refusals"
    router.add_api_route(ROUTE, capabilities, methods=["GET"], summary=summary, openapi_extra=requires(Right.READ))
    return router

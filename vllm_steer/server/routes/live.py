# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/steering/requests/{id}``: change live strengths of a running request.

Requests of other keys are not found, because the owner is part of the lookup.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI
from fastapi import Path as PathParameter
from starlette.requests import Request

from vllm_steer import audit
from vllm_steer.frontend.live import set_strength
from vllm_steer.limits import MAX_STRENGTHS_BYTES
from vllm_steer.registry.schema import LiveStrengths
from vllm_steer.server.auth.current_key import current_owner
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.running_requests import RunningRequests
from vllm_steer.server.http.schemas import JSON, STRENGTHS_BODY
from vllm_steer.server.routes.base import (
    RESPONSES,
    SteeringRoute,
    check_media_type,
    read_body,
    read_object,
    requires,
    state_of,
)

ROUTE = "/v1/steering/requests/{id:path}"
"""Clients choose ids, also with slashes."""
RequestId = Annotated[
    str,
    PathParameter(
        alias="id",
        description="`id` of the response, or the `X-Request-Id` or `request_id` that the client has sent.",
    ),
]


def running_requests_of(app: FastAPI) -> RunningRequests:
    """Return the running requests of this server process."""
    return state_of(app, "vllm_steer_running_requests", RunningRequests)


def add_live_route(app: FastAPI, engine: Any) -> None:
    """Add the route to a server with vLLM's ``AsyncLLM`` ``engine``."""
    app.include_router(make_router(running_requests_of(app), engine))


def make_router(running: RunningRequests, engine: Any) -> APIRouter:
    """Return a router with the route for the requests in ``running`` of ``engine``."""
    router = APIRouter(tags=["steering"], route_class=SteeringRoute, responses=RESPONSES)

    async def change(request_id: RequestId, request: Request) -> LiveStrengths:
        """Set live strengths of a running request of the same API key, for all its prompts and samples.

        The response has the position of the first token with the new strengths, for all samples and for each. A sample
        whose prompt is being computed takes them from the end of its prompt on.
        """
        check_media_type(request, JSON)
        strengths = read_object(await read_body(request, MAX_STRENGTHS_BYTES), ' such as {"calm": 0.3}')
        samples = running.samples(current_owner(), request_id)
        position = await set_strength(engine, request_id, samples, strengths)
        audit.record_strengths(request_id, strengths)
        return LiveStrengths(id=request_id, position=position, positions=dict(position.positions), strengths=strengths)

    router.add_api_route(
        ROUTE,
        change,
        methods=["POST"],
        summary="Set live strengths",
        openapi_extra=requires(Right.STEER, STRENGTHS_BODY),
    )
    return router

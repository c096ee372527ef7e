# SPDX-License-Identifier: Apache-2.0
"""``/v1/steering``: named modules and global steering over HTTP.

Bodies are read as bytes, since they come in two types and what JSON parsers pass over is refused; the OpenAPI document
has their form from :mod:`vllm_steer.server.http.schemas`.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Query
from starlette.requests import Request

from vllm_steer.errors import SteeringError
from vllm_steer.registry.metadata import METADATA_KEYS
from vllm_steer.registry.module import CONTENT_KEYS
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.registry.schema import Deleted, GlobalSteering, ModuleInfo, ModuleList
from vllm_steer.registry.strict_json import parse_json
from vllm_steer.server.auth.current_key import require
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.flags import max_body_bytes
from vllm_steer.server.http.schemas import BINARY, JSON, MODULE_BODY, SET_BODY
from vllm_steer.server.routes.base import RESPONSES, MediaTypeError, SteeringRoute, needs, read_body
from vllm_steer.spec.scalars import shown

_REGISTERED = ("name", *CONTENT_KEYS, *METADATA_KEYS)
_SET = ("base", "prefill", "decode", "edits", "modules", "replace")

Name = Annotated[str, Path(description="A module's name, or `name@sha256:...` for one version of it.")]
Data = Annotated[bool, Query(description="Whether the answer has the vectors themselves.")]
FileName = Annotated[str | None, Query(description="What to call the module of a safetensors body; in JSON, a field.")]


def add_routes(app: FastAPI, registry: SteeringRegistry) -> None:
    """Add the routes to a server; a second call adds nothing."""
    if not getattr(app.state, "vllm_steer_routes", False):
        app.state.vllm_steer_routes = True
        app.include_router(make_router(registry, max_body_bytes(getattr(app.state, "args", None))))


def make_router(registry: SteeringRegistry, max_body: int) -> APIRouter:
    """The routes over ``registry``; bodies may have ``max_body`` bytes."""
    router = APIRouter(prefix="/v1/steering", tags=["steering"], route_class=SteeringRoute, responses=RESPONSES)

    @router.post("/modules", summary="Register a module", openapi_extra=needs(Right.REGISTER, MODULE_BODY))
    async def register(request: Request, name: FileName = None) -> ModuleInfo:
        """Let a name mean a module, or a new version of it. When it is answered, it is on the disk, and every server
        process uses it from the next request on. Registering the same again changes nothing."""
        kind = _media_type(request, (JSON, *BINARY))
        body = await read_body(request, max_body)
        if kind == JSON:
            return await asyncio.to_thread(_register_json, registry, body, name)
        if name is None:
            raise SteeringError("name", "is missing; a safetensors upload is named in the query, ?name=...")
        return await asyncio.to_thread(registry.register_file, name, body)

    @router.get("/modules", summary="List the modules", openapi_extra=needs(Right.READ))
    async def list_modules() -> ModuleList:
        """All modules, without their vectors."""
        return await asyncio.to_thread(registry.list)

    @router.get("/modules/{name}", summary="Look at a module", openapi_extra=needs(Right.READ))
    async def get_module(name: Name, data: Data = False) -> ModuleInfo:
        """One module; with `data`, which takes that right too, also its vectors, as they can be registered again."""
        _require_data(data)
        return await asyncio.to_thread(registry.get, name, data=data)

    @router.delete("/modules/{name}", summary="Delete a module", openapi_extra=needs(Right.REGISTER))
    async def delete_module(name: Name) -> Deleted:
        """Forget a name, or one version of it. Requests that run with it, and global steering, keep it."""
        return await asyncio.to_thread(registry.delete, name)

    @router.post("/set", summary="Set global steering", openapi_extra=needs(Right.GLOBAL, SET_BODY))
    async def set_steering(request: Request) -> GlobalSteering:
        """Steer every request admitted from now on, ahead of the modules that it names and of its own edits. Nothing
        that runs is disturbed."""
        _media_type(request, (JSON,))
        return await asyncio.to_thread(_set_json, registry, await read_body(request, max_body))

    @router.post("/clear", summary="Clear global steering", openapi_extra=needs(Right.GLOBAL))
    async def clear_steering(request: Request) -> GlobalSteering:
        """Steer nothing but what requests bring, from the next request on. It takes no fields."""
        return await asyncio.to_thread(_clear_json, registry, await read_body(request, max_body))

    @router.get("/set", summary="Look at global steering", openapi_extra=needs(Right.READ))
    async def get_steering(data: Data = False) -> GlobalSteering:
        """What is applied to every request; with `data`, which takes that right too, also the vectors."""
        _require_data(data)
        return await asyncio.to_thread(registry.status, data=data)

    return router


def _require_data(data: bool) -> None:
    if data:
        require(Right.DATA)


def _register_json(registry: SteeringRegistry, body: bytes, name: str | None) -> ModuleInfo:
    fields = _object_of(body, _REGISTERED)
    if name is not None and fields.setdefault("name", name) != name:
        raise SteeringError("name", f"is {shown(fields['name'])} in the body and {shown(name)} in the query")
    if fields.get("name") is None:
        raise SteeringError("name", "is missing")
    return registry.register(**fields)


def _set_json(registry: SteeringRegistry, body: bytes) -> GlobalSteering:
    fields = _object_of(body, _SET)
    replace = fields.pop("replace", None) or False
    if not isinstance(replace, bool):
        raise SteeringError("replace", f"must be true or false, not {shown(replace)}")
    return registry.set(**fields, replace=replace)


def _clear_json(registry: SteeringRegistry, body: bytes) -> GlobalSteering:
    if body.strip():
        _object_of(body, ())
    return registry.clear()


def _object_of(body: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    fields = parse_json(body, "body")
    if not isinstance(fields, dict):
        raise SteeringError("body", f"must be a JSON object, not {shown(fields)}")
    for key in fields:
        if key not in keys:
            there = f"the fields are {', '.join(keys)}" if keys else "there are none here"
            raise SteeringError(shown(key).strip("'") or "''", f"is not a field; {there}")
    return fields


def _media_type(request: Request, types: tuple[str, ...]) -> str:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in types:
        raise MediaTypeError("content-type", f"must be {' or '.join(types)}, not {shown(kind)}")
    return kind

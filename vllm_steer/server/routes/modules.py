# SPDX-License-Identifier: Apache-2.0
"""``/v1/steering``: routes for named modules and global steering.

Routes read their bodies as bytes, because a body can have two media types and because usual JSON parsers ignore
duplicate keys. The OpenAPI document takes the schemas from :mod:`vllm_steer.server.http.schemas`.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Query
from starlette.requests import Request

from vllm_steer.errors import SteeringError
from vllm_steer.registry.errors import UnknownModuleError
from vllm_steer.registry.metadata import METADATA_KEYS
from vllm_steer.registry.module import CONTENT_KEYS
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.registry.schema import Deleted, GlobalSteering, ModuleInfo, ModuleList
from vllm_steer.request.scalars import shown, shown_name
from vllm_steer.server.auth.current_key import current_key, require
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.body_checks import clearing_calls, registry_calls
from vllm_steer.server.http.schemas import BINARY, JSON, MODULE_BODY, SET_BODY
from vllm_steer.server.routes.base import RESPONSES, SteeringRoute, check_media_type, read_body, read_object, requires
from vllm_steer.server.settings import max_body_bytes

_MODULE_KEYS = ("name", *CONTENT_KEYS, *METADATA_KEYS)
_SET_KEYS = ("base", "prefill", "decode", "edits", "modules", "replace")

Name = Annotated[str, Path(description="Name of a module, or `name@sha256:...` for one of its versions.")]
Data = Annotated[bool, Query(description="Include the vectors in the response.")]
FileName = Annotated[
    str | None, Query(description="Name of the module, if the body is a file. JSON bodies use `name`.")
]


def add_module_routes(app: FastAPI, registry: SteeringRegistry) -> None:
    """Add the routes to a server. A second call has no effect."""
    if not getattr(app.state, "vllm_steer_routes", False):
        app.state.vllm_steer_routes = True
        app.include_router(make_router(registry, max_body_bytes(getattr(app.state, "args", None))))


def make_router(registry: SteeringRegistry, max_body: int) -> APIRouter:
    """Return the routes that serve ``registry``, with bodies of at most ``max_body`` bytes."""
    router = APIRouter(prefix="/v1/steering", tags=["steering"], route_class=SteeringRoute, responses=RESPONSES)

    @router.post("/modules", summary="Register a module", openapi_extra=requires(Right.REGISTER, MODULE_BODY))
    async def register(request: Request, name: FileName = None) -> ModuleInfo:
        """Register a module, or a new version of it.

        The response is sent when the module is on disk; every server process uses it from its next request on.
        Registering the same content again has no effect.
        """
        media_type = check_media_type(request, JSON, *BINARY)
        body = await read_body(request, max_body)
        if media_type == JSON:
            return await registry_calls().run(_register_json, registry, body, name)
        if name is None:
            raise SteeringError("name", "is missing; the module of a file is named in the query: ?name=...")
        return await registry_calls().run(registry.register_file, name, body)

    @router.get("/modules", summary="List modules", openapi_extra=requires(Right.READ))
    async def list_modules() -> ModuleList:
        """List all modules, without their vectors."""
        return await registry_calls().run(registry.list)

    @router.get("/modules/{name}", summary="Get a module", openapi_extra=requires(Right.READ))
    async def get_module(name: Name, data: Data = False) -> ModuleInfo:
        """Get one module. `data`, which needs the right `data`, adds its vectors in the form that registers them."""
        _require_data(data)
        return await registry_calls().run(registry.get, name, data=data)

    @router.delete("/modules/{name}", summary="Delete a module", openapi_extra=requires(Right.REGISTER))
    async def delete_module(name: Name) -> Deleted:
        """Delete a module, or one version of it. Running requests and global steering that use it are not affected."""
        return await registry_calls().run(registry.delete, name)

    @router.post("/set", summary="Set global steering", openapi_extra=requires(Right.GLOBAL, SET_BODY))
    async def set_steering(request: Request) -> GlobalSteering:
        """Steer every request admitted from now on, before its own modules and edits.

        Running requests are not affected.
        """
        check_media_type(request, JSON)
        return await registry_calls().run(_set_json, registry, await read_body(request, max_body))

    @router.post("/clear", summary="Clear global steering", openapi_extra=requires(Right.GLOBAL))
    async def clear_steering(request: Request) -> GlobalSteering:
        """Clear global steering for requests admitted from now on. The body has no fields."""
        return await clearing_calls().run(_clear_json, registry, await read_body(request, max_body))

    @router.get("/set", summary="Get global steering", openapi_extra=requires(Right.READ))
    async def get_steering(data: Data = False) -> GlobalSteering:
        """Get global steering. `data`, which needs the right `data`, adds the vectors."""
        _require_data(data)
        return await registry_calls().run(registry.status, data=data)

    return router


def _require_data(data: bool) -> None:
    if data:
        require(Right.DATA)


def _register_json(registry: SteeringRegistry, body: bytes, name: str | None) -> ModuleInfo:
    fields = _parse_object(body, _MODULE_KEYS, f"; send a vector file, JSON too, as {BINARY[0]}")
    if name is not None and fields.setdefault("name", name) != name:
        raise SteeringError("name", f"{shown(fields['name'])} in the body, {shown(name)} in the query; give it once")
    if fields.get("name") is None:
        raise SteeringError("name", 'is missing; add "name" to the body')
    return registry.register(**fields)


def _set_json(registry: SteeringRegistry, body: bytes) -> GlobalSteering:
    fields = _parse_object(body, _SET_KEYS)
    replace = fields.pop("replace", None) or False
    if not isinstance(replace, bool):
        raise SteeringError("replace", f"must be true or false, not {shown(replace)}")
    try:
        return registry.set(**fields, replace=replace)
    except UnknownModuleError as error:
        key = current_key()
        raise (error if key is None or Right.READ in key.rights else error.without_names()) from None


def _clear_json(registry: SteeringRegistry, body: bytes) -> GlobalSteering:
    if body.strip():
        _parse_object(body, ())
    return registry.clear()


def _parse_object(body: bytes, keys: tuple[str, ...], hint: str = "") -> dict[str, Any]:
    fields = read_object(body)
    for key in fields:
        if key not in keys:
            allowed = f"use {', '.join(keys)}" if keys else "this route takes none"
            raise SteeringError(shown_name(key), f"unknown field; {allowed}{hint}")
    return fields

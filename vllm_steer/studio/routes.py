# SPDX-License-Identifier: Apache-2.0
"""``GET /studio``: the page and its files.

The files contain no information about the server or its requests, so they need no API key. The page asks for a key and
sends it with each of its requests to the API.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

ROUTE: Final = "/studio"
INDEX: Final = "index.html"
MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media types by suffix. Other files of the folder, such as licences, are not served."""
HEADERS: Final = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # No script can turn text into markup: assignments to innerHTML and the like raise an exception.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def is_studio_path(path: str) -> bool:
    """Return whether ``path``, without the root path of the application, is one of the page's."""
    return path == ROUTE or path.startswith(f"{ROUTE}/")


def page_files(folder: Traversable | None = None, prefix: str = "") -> dict[str, bytes]:
    """Return the files that are served, by their path below :data:`ROUTE`."""
    found: dict[str, bytes] = {}
    for item in (folder or files("vllm_steer.studio") / "page").iterdir():
        if item.is_dir():
            found |= page_files(item, f"{prefix}{item.name}/")
        elif item.name.rpartition(".")[2] in MEDIA_TYPES:
            found[prefix + item.name] = item.read_bytes()
    return found


def add_studio_routes(app: FastAPI) -> None:
    """Add the routes to ``app``. The files are read once, so requests cannot reach other files."""
    contents = page_files()
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for name, content in contents.items()}

    async def add_slash(request: Request) -> Response:
        """Redirect to the folder of the page, in which its relative addresses are valid below any root path."""
        return RedirectResponse(f"{ROUTE[1:]}/", headers=HEADERS)

    async def serve(request: Request) -> Response:
        name = request.path_params["name"] or INDEX
        if name not in contents:
            return Response("The studio has no such file.", 404, HEADERS, "text/plain")
        headers = {**HEADERS, "ETag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(contents[name], 200, headers, MEDIA_TYPES[name.rpartition(".")[2]])

    app.add_route(ROUTE, add_slash, include_in_schema=False)
    app.add_route(f"{ROUTE}/{{name:path}}", serve, include_in_schema=False)

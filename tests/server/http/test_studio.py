# SPDX-License-Identifier: Apache-2.0
"""Routes of the studio's page on an application that accepts everything."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.server.application import make_app
from tests.server.auth.guarded import client_of, make_guarded_app, start, write_keys
from tests.server.fakes import FakeEngine
from vllm_steer.server import lifespan
from vllm_steer.studio import routes
from vllm_steer.studio.routes import HEADERS, add_studio_routes, page_files

PAGE = Path(routes.__file__).parent / "page"
MOST_BYTES = 120_000


def browser(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    add_studio_routes(app)
    return app


def test_the_policy_allows_this_host_only() -> None:
    """Catches a policy with inline scripts, another host's scripts, or requests to another host."""
    policy = dict(rule.split(" ", 1) for rule in HEADERS["Content-Security-Policy"].split("; "))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert {policy[name] for name in ("default-src", "trusted-types", "base-uri", "frame-ancestors")} == {"'none'"}
    assert set(policy.values()) == {"'none'", "'self'"}


async def test_serves_every_file_with_the_policy(app: FastAPI) -> None:
    """Catches a file without its media type, which browsers refuse as a module, and an answer without the policy."""
    async with browser(app) as client:
        for name, content in page_files().items():
            answer = await client.get(f"/studio/{name}")
            assert answer.status_code == 200 and answer.content == content, name
            assert answer.headers["content-type"] == routes.MEDIA_TYPES[name.rpartition(".")[2]]
            assert {key: answer.headers[key] for key in HEADERS} == HEADERS
        assert (await client.get("/studio/")).content == (PAGE / "index.html").read_bytes()
        again = await client.get("/studio/", headers={"if-none-match": (await client.get("/studio/")).headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["../routes.py", "%2e%2e/routes.py", "..%2froutes.py", "vendor", "vendor/LICENSES.txt", "x"]
)
async def test_serves_no_other_file(name: str, app: FastAPI) -> None:
    """Catches a path that leads out of the folder, and files that are no part of the page."""
    async with browser(app) as client:
        answer = await client.get(f"/studio/{name}")
        assert answer.status_code == 404 and b"import" not in answer.content


async def test_redirect_is_relative(app: FastAPI) -> None:
    """Catches a redirect that leaves the root path of a proxy."""
    async with browser(app) as client:
        answer = await client.get("/studio")
        assert answer.status_code == 307 and answer.headers["location"] == "studio/"


@pytest.mark.parametrize("on", [True, False])
async def test_flag_switches_the_page_on(on: bool) -> None:
    """Catches a page that is served without the flag, or not with it."""
    app = make_app(FakeEngine())
    app.state.args.steering_studio = on
    await lifespan._start({"type": "lifespan", "app": app})
    async with browser(app) as client:
        assert (await client.get("/studio/")).status_code == (200 if on else 404)


@pytest.mark.parametrize("prefix", ["", "/api"])
async def test_page_works_below_a_root_path(prefix: str, tmp_path: Path) -> None:
    """Catches a page that is only found, or only public, at the root of the host."""
    path = tmp_path / "keys.json"
    write_keys(path, {"none": ()})
    app = make_guarded_app(path, steering_studio=True)
    app.root_path = prefix
    await start(app)
    async with client_of(app) as client:
        assert (await client.get(f"{prefix}/studio/app.js")).status_code == 200
        assert (await client.get(f"{prefix}/studio")).headers["location"] == "studio/"


async def test_page_needs_no_key_and_the_api_does(tmp_path: Path) -> None:
    """Catches a page that nobody with keys can open, and a prefix that opens other paths."""
    path = tmp_path / "keys.json"
    write_keys(path, {"none": ()})
    app = await start(make_guarded_app(path, steering_studio=True))
    async with client_of(app) as client:
        assert (await client.get("/studio/")).status_code == 200
        assert (await client.get("/studio/app.js")).status_code == 200
        for closed in ("/studios", "/studio-x", "/v1/steering/capabilities", "/v1/models"):
            assert (await client.get(closed)).status_code == 401, closed


def test_page_is_small_and_names_no_other_host() -> None:
    """Catches a page over its size, inline scripts and styles, and addresses of other hosts."""
    contents = page_files()
    assert sum(map(len, contents.values())) < MOST_BYTES
    index = contents["index.html"].decode()
    assert re.findall(r"<script(?![^>]*\ssrc=)", index) == re.findall(r"<style|\sstyle=|\son\w+=", index) == []
    for name, content in contents.items():
        hosts = set(re.findall(r"https?://([^/\s\"'`)]+)", content.decode()))
        assert hosts <= {"www.w3.org"}, name  # names of XML namespaces
    own = "".join(content.decode() for name, content in contents.items() if not name.startswith("vendor/"))
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|sessionStorage", own
    )


def test_vendored_modules_are_unmodified() -> None:
    """Catches a changed module, and one without version, licence or digest."""
    text = (PAGE / "vendor" / "LICENSES.txt").read_text()
    listed = dict(re.findall(r"^(\S+\.js): .*? sha384-(\S+)$", text, re.MULTILINE))
    found = {path.name: path.read_bytes() for path in (PAGE / "vendor").glob("*.js")}
    assert listed == {
        name: base64.b64encode(hashlib.sha384(content).digest()).decode() for name, content in found.items()
    }

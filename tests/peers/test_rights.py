# SPDX-License-Identifier: Apache-2.0
"""Bodies and routes of peers on a server with keys: rights come first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.auth.guarded import client_of, make_guarded_app, rejected, write_keys
from vllm_steer.peers.rhizonymph.http import RhizonymphMiddleware
from vllm_steer.peers.vllm_lens.http import VllmLensMiddleware
from vllm_steer.server.auth.rights import Right

pytest.importorskip("zstandard")


@pytest.mark.parametrize(
    ("middleware", "reader", "body", "param", "right"),
    [
        (VllmLensMiddleware, "read_keys", {"extra_args": {"apply_steering_vectors": [{}]}}, "steering", "steer"),
        (VllmLensMiddleware, "read_keys", {"vllm_xargs": {"output_residual_stream": [1]}}, "capture", "capture"),
        (RhizonymphMiddleware, "translate_fields", {"patch": [{}]}, "steering", "steer"),
        (RhizonymphMiddleware, "translate_fields", {"capture": {"memory": {}}}, "capture", "capture"),
    ],
)
async def test_rights_are_checked_before_a_body_is_translated(
    middleware: Any, reader: str, body: Any, param: str, right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches work for a key without rights: decompression, and loops over its lists."""
    calls: list[Any] = []

    def read(*args: Any) -> Any:
        calls.append(args)
        return dict(body)

    monkeypatch.setattr(sys.modules[middleware.__module__], reader, read)
    secrets = write_keys(tmp_path / "keys", {"none": (), "all": tuple(Right)})
    app = make_guarded_app(tmp_path / "keys")
    app.add_middleware(middleware)
    answer = await client_of(app, secrets["none"]).post("/v1/completions", json={"prompt": "x", **body})
    error = rejected(answer, 403)
    assert error["param"] == param
    assert f"right {right!r}" in error["message"]
    assert calls == []


@pytest.mark.parametrize(
    ("middleware", "path", "param"),
    [
        (VllmLensMiddleware, "/v1/hooks/register", "apply_hooks"),
        (RhizonymphMiddleware, "/v1/steering/dynamic", "dynamic"),
    ],
)
async def test_refused_routes_are_answered_after_authentication(
    middleware: Any, path: str, param: str, tmp_path: Path
) -> None:
    """Catches an answer that tells a stranger which interfaces a server has."""
    secrets = write_keys(tmp_path / "keys", {"none": ()})
    app = make_guarded_app(tmp_path / "keys")
    app.add_middleware(middleware)
    rejected(await client_of(app).post(path, json={}), 401)
    assert rejected(await client_of(app, secrets["none"]).post(path, json={}), 400)["param"] == param

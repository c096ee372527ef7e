# SPDX-License-Identifier: Apache-2.0
"""Bodies and routes of peers on a server with keys: rights come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.auth.guarded import client_of, make_guarded_app, rejected, write_keys
from vllm_steer.peers.rhizonymph import http as rhizonymph
from vllm_steer.peers.vllm_lens import http as lens
from vllm_steer.server.auth.rights import Right

pytest.importorskip("zstandard")


@pytest.mark.parametrize(
    ("peer", "middleware", "body", "param", "reader"),
    [
        (lens, lens.VllmLensMiddleware, {"extra_args": {"apply_steering_vectors": [{}]}}, "steering", "read_keys"),
        (lens, lens.VllmLensMiddleware, {"vllm_xargs": {"output_residual_stream": [1]}}, "capture", "read_keys"),
        (rhizonymph, rhizonymph.RhizonymphMiddleware, {"patch": [{}]}, "steering", "translate_fields"),
    ],
)  # fmt: skip
async def test_rights_are_checked_before_a_body_is_translated(
    peer: Any, middleware: Any, body: Any, param: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches work for a key without rights: decompression, and loops over its lists."""
    calls: list[Any] = []

    def read(*args: Any) -> Any:
        calls.append(args)
        return dict(body)

    monkeypatch.setattr(peer, reader, read)
    secrets = write_keys(tmp_path / "keys", {"none": (), "all": tuple(Right)})
    app = make_guarded_app(tmp_path / "keys")
    app.add_middleware(middleware)
    answer = await client_of(app, secrets["none"]).post("/v1/completions", json={"prompt": "x", **body})
    assert rejected(answer, 403)["param"] == param
    assert calls == []


@pytest.mark.parametrize(
    ("middleware", "path", "param"),
    [
        (lens.VllmLensMiddleware, "/v1/hooks/register", "apply_hooks"),
        (rhizonymph.RhizonymphMiddleware, "/v1/steering/dynamic", "dynamic"),
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

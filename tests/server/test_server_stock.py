# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` without steering, with the plugin installed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.server import HIDDEN, MODEL, environment, run_server, vllm_command

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello"},
}
FIELDS: dict[str, Any] = {
    "steering_vectors": {"post_block": {"1": [1.0] * HIDDEN}},
    "capture": {"memory": {"hooks": {"post_block": [1]}}},
}


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from run_server(model, [*vllm_command(), "serve"], [], tmp_path_factory.mktemp("log") / "server.log")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_stock_server_refuses_fields(route: str, stream: bool, url: str) -> None:
    """Catches a fluent but unsteered response of a server without steering."""
    body = {"model": MODEL, "stream": stream, **BODIES[route]}
    for name, value in FIELDS.items():
        refused = httpx.post(f"{url}{route}", json={**body, name: value}, timeout=60)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["param"] == name
        assert "--enable-steering" in error["message"]
    assert httpx.post(f"{url}{route}", json=body, timeout=60).status_code == 200


def test_a_stock_server_refuses_limits(tmp_path: Path) -> None:
    """Catches a server that ignores a steering limit on its command line, and flags unknown to `vllm`."""
    command = [*vllm_command(), "serve", str(tmp_path), "--steering-max-rows", "8"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert result.returncode == 2
    assert "--steering-max-rows: has no effect without --enable-steering" in result.stderr
    assert "Traceback" not in result.stderr

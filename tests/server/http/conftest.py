# SPDX-License-Identifier: Apache-2.0
"""A client of the middleware in front of an application without vLLM."""

from __future__ import annotations

import httpx
import pytest

from tests.server.application import client_of, make_app
from tests.server.fakes import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> httpx.AsyncClient:
    return client_of(make_app(engine))

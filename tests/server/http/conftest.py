# SPDX-License-Identifier: Apache-2.0
"""A client of the middleware in front of an application without vLLM.

Imports are in the fixtures, because pytest-xdist's own process imports this file before the workers start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from tests.server.fakes import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    from tests.server.fakes import FakeEngine

    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> httpx.AsyncClient:
    from tests.server.application import client_of, make_app

    return client_of(make_app(engine))

# SPDX-License-Identifier: Apache-2.0
"""Hostile requests to a real server: it refuses each with a reason and keeps working."""

from __future__ import annotations

import httpx
import pytest

from tests.server.hostile.case import MODULES, SET, VALID_BODIES, Case, find_fault, greedy, send
from tests.server.hostile.corpus import CATEGORIES
from vllm_steer.server.http.request_guard import STEERABLE_ROUTES

MAX_SHOWN = 20


@pytest.mark.failure(14)
@pytest.mark.parametrize("name", CATEGORIES)
def test_refuses_every_request_of_a_category(name: str, client: httpx.Client) -> None:
    """Catches accepted requests, HTTP 500, errors without reason or field, and changed responses afterwards."""
    before, modules = greedy(client), client.get(MODULES).json()
    faults = [problem for case in CATEGORIES[name].make() if (problem := find_fault(case, send(client, case)))]
    assert not faults, "\n".join([f"{len(faults)} faults:", *faults[:MAX_SHOWN]])
    assert client.get("/health").status_code == 200
    assert client.get(MODULES).json() == modules
    assert greedy(client) == before


def test_the_corpus_covers_every_route() -> None:
    """Catches an empty category, and a steerable route without hostile bodies."""
    cases = {name: list(category.make()) for name, category in CATEGORIES.items()}
    assert min(len(made) for made in cases.values()) >= 50
    assert sum(len(made) for made in cases.values()) >= 1000
    assert {*STEERABLE_ROUTES, MODULES, SET} <= {case.target for made in cases.values() for case in made}
    assert set(VALID_BODIES) == set(STEERABLE_ROUTES)


def test_the_check_rejects_broken_responses() -> None:
    """Negative control: checks responses of a broken server."""
    case = Case("x", "POST", SET)
    good = {"message": "x: is wrong", "type": "BadRequestError", "param": "x", "code": 400}
    assert find_fault(case, httpx.Response(400, json={"error": good})) is None
    for status, body in (
        (200, {"error": good}),
        (500, {"error": {**good, "code": 500}}),
        (400, {"error": {**good, "param": None}}),
        (400, {"error": {**good, "message": ""}}),
        (400, {"error": {**good, "message": "x" * 5000}}),
        (400, {"detail": "x"}),
        (404, {"error": good}),
    ):
        assert find_fault(case, httpx.Response(status, json=body)) is not None, body

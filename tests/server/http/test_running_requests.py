# SPDX-License-Identifier: Apache-2.0
"""Ids of running requests, as clients know them."""

from __future__ import annotations

import tracemalloc

import pytest

from vllm_steer.frontend.live import EndedRequestError, LiveSample, UnknownRequestError
from vllm_steer.server.http.running_requests import (
    BATCH_ROUTE,
    RESPONSES_ROUTE,
    RunningRequest,
    RunningRequests,
    client_ids,
)

ALICE, BOB = b"a", b"b"


@pytest.mark.parametrize(
    ("engine_id", "route", "header", "expected"),
    [
        ("cmpl-job-7-0", "/v1/completions", None, ("cmpl-job-7", "job-7")),
        ("chatcmpl-job_7", "/v1/chat/completions", None, ("chatcmpl-job_7", "job_7")),
        ("chatcmpl-job_7_1", BATCH_ROUTE, None, ("chatcmpl-job_7", "job_7")),
        ("resp_ab_0", RESPONSES_ROUTE, None, ("resp_ab",)),
        ("resp_ab_0", RESPONSES_ROUTE, "mine_0", ("resp_ab", "mine_0")),
        ("job-7_0", RESPONSES_ROUTE, None, ("job-7",)),
        ("job-7_1_12", RESPONSES_ROUTE, None, ("job-7_1",)),
        ("cmpl-job-7_0", RESPONSES_ROUTE, None, ("cmpl-job-7",)),
        ("chatcmpl-job_0", RESPONSES_ROUTE, "mine", ("chatcmpl-job", "mine")),
    ],
)
def test_client_ids(engine_id: str, route: str, header: str | None, expected: tuple[str, ...]) -> None:
    """Catches the number of a prompt or run left in an id, and a part of the client's own id cut off."""
    assert client_ids(engine_id, route, header) == expected


def test_lookup_by_owner() -> None:
    """Catches requests found by other keys, a lost sample, and an ambiguous id resolved to any of its requests."""
    running = RunningRequests()
    first, second, other = (RunningRequest(owner) for owner in (ALICE, ALICE, BOB))
    s0, s1, s2, s3 = (LiveSample(f"s{i}", f"live {i}") for i in range(4))
    for sample in (s0, s1):
        running.add_sample(first, "cmpl-one-0", sample)
    running.add_sample(second, "chatcmpl-one", s2)
    running.add_sample(other, "cmpl-theirs-0", s3)
    assert running.samples(ALICE, "cmpl-one") == [s0, s1._replace(number=1)]
    assert running.samples(BOB, "theirs") == [s3]
    with pytest.raises(UnknownRequestError):
        running.samples(ALICE, "theirs")
    with pytest.raises(EndedRequestError, match="2 running requests"):
        running.samples(ALICE, "one")
    running.remove(first)
    assert running.samples(ALICE, "one") == [s2]
    with pytest.raises(EndedRequestError, match="has ended"):
        running.samples(ALICE, "cmpl-one")
    with pytest.raises(UnknownRequestError):
        running.samples(BOB, "cmpl-one")


def test_ended_requests_with_long_ids() -> None:
    """Catches memory that a client fills with long values of `request_id`: the ids of ended requests were kept."""
    running, size = RunningRequests(), 1 << 20
    tracemalloc.start()
    try:
        for number in range(8):
            request = RunningRequest(ALICE)
            running.add_sample(request, f"chatcmpl-{number}{'x' * size}", LiveSample("s", ""))
            running.remove(request)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 * size
    for name in (f"{number}{'x' * size}", f"chatcmpl-{number}{'x' * size}"):
        with pytest.raises(EndedRequestError, match="has ended"):
            running.samples(ALICE, name)

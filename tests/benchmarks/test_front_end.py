# SPDX-License-Identifier: Apache-2.0
"""Tests of the bodies and the figures of benchmarks.front_end."""

from __future__ import annotations

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from benchmarks.front_end import ROUTES, TARGETS, WAYS, body, summarize
from vllm_steer.params import FIELDS, SamplingParams


def test_bodies_are_requests_of_vllm_and_of_this_package() -> None:
    """Catches a field that has another form than a server accepts, and equal vectors of two requests."""
    for route, request in zip(ROUTES, (CompletionRequest, ChatCompletionRequest), strict=True):
        for way in WAYS:
            sent = body(route, way, 3)
            request.model_validate(sent)
            fields = {name: sent[name] for name in FIELDS if name in sent}
            assert bool(fields) == (way in list(WAYS)[3:])
            SamplingParams(**fields)
            assert 24 <= sent["max_tokens"] <= 72
    assert body(ROUTES[0], "own vector", 1)["steering_vectors"] != body(ROUTES[0], "own vector", 2)["steering_vectors"]


def test_figures_compare_the_ways_of_a_round() -> None:
    """Catches a ratio to another round's stock server, and seconds per request of another cell."""
    cells = [
        {"route": ROUTES[0], "streams": 64, "way": way, "round": number, "seconds": seconds, "events": 1000}
        for number, stock in enumerate((1.0, 2.0, 4.0))
        for way, seconds in (("stock", stock), ("idle", 1.5 * stock))
    ]
    [figure] = summarize(cells)
    assert (figure["way"], figure["rounds"], figure["ratio"]) == ("idle", 3, 1.5)
    assert figure["added_ms_per_request"] == round(1000 * 1.0 / 192, 3)
    assert figure["target"] == TARGETS["idle"]

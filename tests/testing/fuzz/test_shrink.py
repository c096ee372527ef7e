# SPDX-License-Identifier: Apache-2.0
"""Simpler forms of requests, without an engine."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from vllm_steer.testing.fuzz.draw import draw_requests
from vllm_steer.testing.fuzz.shrink import _simpler_forms, _size
from vllm_steer.testing.fuzz.workload import ModelFacts, Request, sampling_params

FACTS = ModelFacts(hidden=16, layers=4, vocab=128, scale=(1.0,) * 100)


def smallest(request: Request) -> Request:
    """Return what remains of a request if every simpler form still fails."""
    while smaller := [form for form in _simpler_forms(request, FACTS.hidden) if _size(form) < _size(request)]:
        request = min(smaller, key=_size)
    return request


@pytest.mark.parametrize("seed", range(3))
def test_every_property_can_be_removed(seed: int) -> None:
    """Catches a new field of a case that stays in every finding, and an invalid form of a request."""
    for request in draw_requests(np.random.default_rng(seed), 30, FACTS):
        found = smallest(request)
        assert msgspec.to_builtins(found) == {"name": request.name, "prompt": found.prompt, "max_tokens": 1}
        assert len(found.prompt) <= 8


def test_one_property_is_removed_at_a_time() -> None:
    """Catches forms that lose a needed property together with another."""
    requests = draw_requests(np.random.default_rng(5), 60, FACTS)
    request = next(each for each in requests if len(each.edits) > 1 and each.capture is not None)
    forms = list(_simpler_forms(request, FACTS.hidden))
    assert any(form.capture is None and form.edits == request.edits for form in forms)
    assert any(len(form.edits) == len(request.edits) - 1 and form.capture == request.capture for form in forms)
    for form in forms:
        sampling_params(form.standalone, FACTS.hidden)

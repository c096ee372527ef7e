# SPDX-License-Identifier: Apache-2.0
"""What a running engine refuses: before it hears of the request, with a sentence, and it serves on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.answers import params, prompt, run, tokens_of
from tests.tiny import HIDDEN, direction
from vllm_steer import LLM, Edit, SteeringError

V = direction(1)


def edit(**changes: Any) -> list[Edit]:
    fields: dict[str, Any] = {"kind": "add", "point": "post_block", "layers": 1, "vector": V}
    return [Edit(**{**fields, **changes})]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "narrow": ({"steering_vectors": {"post_block": {1: V[:-1]}}}, "hidden size is 64"),
    "wide": ({"steering_vectors": {"post_block": {1: np.ones(HIDDEN + 1)}}}, "hidden size is 64"),
    "layer out of range": ({"decode_steering_vectors": {"pre_attn": {4: V}}}, "layer 4"),
    "position beyond the model": ({"steering": edit(tokens=[512])}, "position 512"),
    "before the prompt": ({"steering": edit(tokens=[-9])}, "-9"),
    "too many segments": ({"steering": edit(tokens=list(range(0, 80, 2)))}, "max_segments"),
    "bytes by hand": ({"extra_args": {"steer": b"\x01\x02"}}, "extra_args.steer"),
    "text by hand": ({"extra_args": {"steer": "x"}}, "extra_args.steer"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_refused_by_name_and_the_engine_serves_on(llm: Any, name: str) -> None:
    """Catches a bad field that reaches the engine, where it would take every request down."""
    fields, said = BAD[name]
    with pytest.raises(SteeringError, match=said):
        run(llm, [prompt(1, 2, 3)], [params(**fields)])
    assert len(tokens_of(run(llm, [prompt(1, 2, 3)], [params()])[0])) == 6


def test_a_bad_request_does_not_take_its_neighbours(llm: Any) -> None:
    """Failure: one request's error taking its neighbours' answers."""
    with pytest.raises(SteeringError):
        run(llm, [prompt(1, 2, 3)] * 2, [params(), params(steering_vectors={"post_block": {99: V}})])
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(tokens_of(run(llm, [prompt(1, 2, 3)], [params()])[0])) == 6


def test_beam_search_is_refused(llm: Any) -> None:
    """Catches beams that run unsteered."""
    with pytest.raises(SteeringError, match="beam search"):
        llm.beam_search([prompt(1, 2, 3)], params(steering_vectors={"post_block": {1: V}}))


def test_a_malformed_program_in_the_scheduler_ends_its_request_only(llm: Any) -> None:
    """Catches an exception in the scheduler, which kills the engine: here the front end's check is circumvented."""
    from vllm_steer import frontend

    kept = frontend.check_engine_request
    frontend.check_engine_request = lambda processor, request: None  # type: ignore[assignment]
    try:
        engine = llm.llm_engine
        engine.add_request("bad", prompt(1, 2, 3), params(extra_args={"steer": b"junk"}))
        engine.add_request("good", prompt(1, 2, 3), params())
        done = {}
        for _ in range(60):
            done.update({o.request_id: o for o in engine.step() if o.finished})
        engine.abort_request(["bad"])
    finally:
        frontend.check_engine_request = kept
    assert len(tokens_of(done["good"])) == 6


def test_settings_are_refused_at_start() -> None:
    """Catches limits that mean nothing, and our arguments beside a user's own worker."""
    for settings, said in (
        ({"steering_config": {"max_rows": 0}}, "max_rows"),
        ({"steering_config": {"rows": 5}}, "rows"),
        ({"worker_cls": "a.B"}, "worker_cls"),
        ({"scheduler_cls": "a.B"}, "scheduler_cls"),
    ):
        with pytest.raises(SteeringError, match=said):
            LLM(model="none", enable_steering=True, **settings)
    with pytest.raises(SteeringError, match="enable_steering"):
        LLM(model="none", steering_config={"max_rows": 5})

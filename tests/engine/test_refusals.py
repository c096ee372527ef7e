# SPDX-License-Identifier: Apache-2.0
"""Tests of what a running engine refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import LLM as VllmLLM
from vllm.sampling_params import BeamSearchParams

from tests.engine.answers import finish, params, prompt, run, tokens_of
from tests.engine.captures import capture
from tests.engine.test_off import worker_of
from tests.tiny import HIDDEN, LAYERS, direction
from vllm_steer import LLM, Edit, SteeringError
from vllm_steer.params import PROGRAM_KEY
from vllm_steer.points import OPTIONAL_POINTS, points_on
from vllm_steer.program import compile_program

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
def test_rejects_bad_fields_and_keeps_serving(llm: Any, name: str) -> None:
    """Catches a bad field that reaches the engine, where it would fail every request."""
    fields, said = BAD[name]
    with pytest.raises(SteeringError, match=said):
        run(llm, [prompt(1, 2, 3)], [params(**fields)])
    assert len(tokens_of(run(llm, [prompt(1, 2, 3)], [params()])[0])) == 6


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("name", "field"), [("steering", "steering"), ("capture", "capture"), ("edits", "steering")])
def test_rejects_assigned_fields(llm: Any, own: bool, name: str, field: str) -> None:
    """Catches ``params.steering = ...``, which vLLM's class accepts and nothing reads."""
    late = params() if own else llm.get_default_sampling_params()
    setattr(late, name, edit() if field == "steering" else {"memory": {"hooks": {"post_block": [0]}}})
    with pytest.raises(SteeringError, match=rf"{name}: was assigned .* SamplingParams\({field}="):
        run(llm, [prompt(1, 2, 3)], [late])


def test_bad_request_does_not_affect_others(llm: Any) -> None:
    """Catches an error of one request that ends others."""
    with pytest.raises(SteeringError):
        run(llm, [prompt(1, 2, 3)] * 2, [params(), params(steering_vectors={"post_block": {99: V}})])
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(tokens_of(run(llm, [prompt(1, 2, 3)], [params()])[0])) == 6


@pytest.mark.feature("beam search (refused with steering)", "steer", "capture")
def test_rejects_beam_search(llm: Any) -> None:
    """Catches beams that run unsteered, and captures that never arrive."""
    for fields in ({"steering_vectors": {"post_block": {1: V}}}, {"capture": capture()}):
        with pytest.raises(SteeringError, match="beam search"):
            llm.beam_search([prompt(1, 2, 3)], params(**fields))


@pytest.mark.parametrize("tier", ["base", "prefill", "decode"])
def test_beam_search_under_global_steering(llm: Any, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches beams on whose generated tokens edits of the prompt act, and edits of generated tokens do not."""
    searched: list[Any] = []
    monkeypatch.setattr(VllmLLM, "beam_search", lambda llm, prompts, given: searched.append(given))
    given = BeamSearchParams(beam_width=2, max_tokens=3)
    llm.steering.set(**{tier: {"post_block": {1: V}}})
    try:
        if tier == "base":
            llm.beam_search([prompt(1, 2, 3)], given)
        else:
            with pytest.raises(SteeringError, match=r"beam_search: .*global steering has edits of some tokens"):
                llm.beam_search([prompt(1, 2, 3)], given)
    finally:
        llm.steering.clear()
    llm.beam_search([prompt(1, 2, 3)], given)
    assert len(searched) == 1 + (tier == "base")


@pytest.mark.parametrize("steering", [{"base": {"post_block": {1: V}}}, {}])
def test_steps_of_beams_get_the_global_steering_of_the_start(llm: Any, steering: Any, monkeypatch: Any) -> None:
    """Catches steps whose global steering was changed during the search and has not been checked."""
    programs: list[Any] = []

    def search(llm: Any, prompts: Any, given: Any) -> None:
        for step in range(2):
            llm.llm_engine.add_request(f"beam {step}", prompts[0], params(1))
            (state,) = llm.llm_engine.output_processor.request_states.values()
            (output,) = finish(llm.llm_engine).values()
            programs.append((type(state), output.steering_applied))
            llm.steering.set(decode={"post_block": {2: V}})

    monkeypatch.setattr(VllmLLM, "beam_search", search)
    if steering:
        llm.steering.set(**steering)
    try:
        llm.beam_search([prompt(1, 2, 3)], BeamSearchParams(beam_width=2, max_tokens=2))
        assert programs[0] == programs[1]
        assert (programs[0][1] is not None) == bool(steering)
        later = run(llm, [prompt(1, 2, 3)], [params(2)])[0]
        assert later.steering_applied != programs[0][1]
    finally:
        llm.steering.clear()


@pytest.mark.feature("streaming input (refused with steering)", "steer", "capture")
def test_rejects_steered_streaming_input_only(llm: Any) -> None:
    """Catches a steered session, whose outputs become prompt and would be edited again."""
    from vllm_steer.frontend.requests import check_engine_request

    def session(**fields: Any) -> Any:
        return SimpleNamespace(
            sampling_params=params(**fields), resumable=True, prompt_token_ids=[1, 2, 3], prompt_embeds=None
        )

    processor = llm.llm_engine.input_processor
    for fields in ({"steering_vectors": {"post_block": {1: V}}}, {"capture": capture()}):
        with pytest.raises(SteeringError, match="streaming input"):
            check_engine_request(processor, session(**fields))
    check_engine_request(processor, session())


@pytest.fixture
def no_front_end_check(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every program through to the scheduler."""
    from vllm_steer.frontend import requests, sample_state
    from vllm_steer.plugin import front_end

    monkeypatch.setattr(sample_state, "program_of", lambda params: None)
    monkeypatch.setattr(requests, "check_engine_request", lambda processor, request: None)
    monkeypatch.setattr(front_end, "complete_params", lambda context, params: params)


def run_bad_beside_good(llm: Any, program: bytes) -> dict[str, Any]:
    """Run a request with ``program`` beside a plain one and return the outputs by request id."""
    engine = llm.llm_engine
    engine.add_request("bad", prompt(1, 2, 3), params(extra_args={PROGRAM_KEY: program}))
    engine.add_request("good", prompt(1, 2, 3), params())
    done = {}
    done.update(finish(engine))
    return done


@pytest.mark.usefixtures("no_front_end_check")
def test_scheduler_ends_only_the_request_with_a_malformed_program(llm: Any) -> None:
    """Catches an exception in the scheduler, which would kill the engine."""
    done = run_bad_beside_good(llm, b"junk")
    assert len(tokens_of(done["good"])) == 6
    assert done["bad"].outputs[0].finish_reason == "error"
    assert "extra_args.steer" in done["bad"].outputs[0].stop_reason


@pytest.mark.parametrize("point", OPTIONAL_POINTS)
def test_rejects_disabled_points_with_the_flag(llm: Any, point: Any) -> None:
    """Catches a point that is accepted and ignored. The engine keeps serving."""
    for fields in (
        {"steering_vectors": {point: {1: V}}},
        {"steering": edit(point=point, kind="ablate", layers="all")},
        {"capture": {"memory": {"hooks": {point: "all"}}}},
    ):
        with pytest.raises(SteeringError, match=f"without {point}; add --steering-points {point} "):
            run(llm, [prompt(1, 2, 3)], [params(**fields)])
    with pytest.raises(SteeringError, match=f"--steering-points {point}"):
        llm.steering.register("m", base={point: {1: V}})
    assert len(tokens_of(run(llm, [prompt(1, 2, 3)], [params()])[0])) == 6


def test_disabled_points_have_no_taps(llm: Any) -> None:
    """Catches a tap or a table column of a disabled point."""
    assert worker_of(llm).model_runner.steering.tables.num_sites == LAYERS * len(points_on(()))
    taps = llm.apply_model(lambda model: [len(m.steering_taps) for m in model.modules() if hasattr(m, "steering_taps")])
    assert taps == [[3] * LAYERS]


@pytest.mark.usefixtures("no_front_end_check")
def test_scheduler_ends_only_the_request_at_a_disabled_point(llm: Any) -> None:
    """Catches a program at a point without a table column that reaches the worker and fails every request."""
    done = run_bad_beside_good(llm, compile_program(edit(point="attn_out")).to_bytes())
    assert len(tokens_of(done["good"])) == 6
    assert "--steering-points" in done["bad"].outputs[0].stop_reason


def test_rejects_bad_settings_at_start() -> None:
    """Catches meaningless limits, and steering settings beside a user's own worker."""
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

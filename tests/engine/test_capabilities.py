# SPDX-License-Identifier: Apache-2.0
"""What is refused because it can never fit, by the numbers alone."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest

from vllm_steer import CaptureSpec, Edit, SteeringConfig, SteeringError
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.frontend.context import NO_ROWS_OF_EARLIER_STAGES
from vllm_steer.program import compile_program


def test_a_capture_beyond_the_budget_is_refused_by_its_largest_size() -> None:
    """Catches a request that would wait for ever: 4 layers x 64 numbers x 4 bytes are 1 KiB a position."""
    capabilities = Capabilities(4, 64, 100000, "float32", {}, SteeringConfig(capture_mib=1))
    program = compile_program([], [CaptureSpec(hooks={"post_block": "all"}, positions="all")])
    capabilities.check(program, prompt_len=1000, max_tokens=25)
    with pytest.raises(SteeringError, match="can never fit"):
        capabilities.check(program, prompt_len=1000, max_tokens=26)
    capabilities.check(program, prompt_len=1000)


def test_drafts_take_room_beside_the_token_that_they_follow() -> None:
    """Catches a request that is taken on and that no step has room for: a token and 3 drafts, of 4 layers each."""
    program = compile_program([], [CaptureSpec(hooks={"post_block": "all"}, positions="all_generated")])
    for rows, fits in ((16, True), (15, False)):
        capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig(capture_rows=rows), drafts=3)
        with nullcontext() if fits else pytest.raises(SteeringError, match="needs 16 of capture_rows"):
            capabilities.check(program, prompt_len=10)


def test_captures_are_refused_where_rows_of_earlier_stages_are_lost() -> None:
    """Catches half of a capture delivered as if it were all: edits alone are served there."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig(), no_capture=NO_ROWS_OF_EARLIER_STAGES)
    edit = Edit(kind="add", point="post_block", layers=0, vector=[1.0] * 64)
    capabilities.check(compile_program([edit]), prompt_len=10)
    read = CaptureSpec(hooks={"post_block": [3]}, positions="all")
    with pytest.raises(SteeringError, match=r"capture: is not served: under pipeline parallelism"):
        capabilities.check(compile_program([], [read]), prompt_len=10)


def test_what_one_engine_serves_another_may_not() -> None:
    """Catches a program that counts as served everywhere because one engine has looked at it, and what depends on the
    request's lengths looked at once."""
    program = compile_program([Edit(kind="add", point="post_block", layers=3, vector=[1.0] * 64, tokens=[-5])])
    roomy = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    roomy.check(program, prompt_len=10)
    for _ in range(2):
        with pytest.raises(SteeringError, match="layer 3 does not exist"):
            Capabilities(3, 64, 1000, "float32", {}, SteeringConfig()).check(program, prompt_len=10)
    no_edits = Capabilities(4, 64, 1000, "float32", {"post_block": {3: "a reason"}}, SteeringConfig())
    for _ in range(2):
        with pytest.raises(SteeringError, match="not served at layer 3: a reason"):
            no_edits.check(program, prompt_len=10)
    with pytest.raises(SteeringError, match="tokens"):
        roomy.check(program, prompt_len=4)


def test_where_programs_act_is_remembered_as_long_as_they_are_there() -> None:
    """Catches a front end that remembers every program it has ever seen, and one that looks at each again."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    for i in range(3):
        capabilities.check(compile_program([Edit(kind="add", point="post_block", layers=i, vector=[1.0] * 64)]), 10)
    gc.collect()
    assert not capabilities._placed
    program = compile_program([Edit(kind="add", point="post_block", layers=1, vector=[1.0] * 64)])
    capabilities.check(program, 10)
    assert list(capabilities._placed.values()) == [program]

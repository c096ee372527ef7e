# SPDX-License-Identifier: Apache-2.0
"""Tests of the check of programs against an engine's limits."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest

from vllm_steer import CaptureSpec, Edit, SteeringConfig, SteeringError
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.frontend.context import NO_ROWS_OF_EARLIER_STAGES
from vllm_steer.program import compile_program


def test_rejects_captures_beyond_the_budget() -> None:
    """Catches a request that would wait forever: 4 layers x 64 float32 values are 1 KiB per position."""
    capabilities = Capabilities(4, 64, 100000, "float32", {}, SteeringConfig(capture_mib=1))
    program = compile_program([], [CaptureSpec(hooks={"post_block": "all"}, positions="all")])
    capabilities.check(program, prompt_len=1000, max_tokens=25)
    with pytest.raises(SteeringError, match="needs up to 1 MiB; the engine allows 1 "):
        capabilities.check(program, prompt_len=1000, max_tokens=26)
    capabilities.check(program, prompt_len=1000)


def test_counts_the_rows_of_drafts() -> None:
    """Catches an accepted request that fits no step: a token and 3 drafts with 4 layers each."""
    program = compile_program([], [CaptureSpec(hooks={"post_block": "all"}, positions="all_generated")])
    for rows, fits in ((16, True), (15, False)):
        capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig(capture_rows=rows), drafts=3)
        refused = pytest.raises(
            SteeringError, match=r"^capture: needs 16 captured rows for one token; the engine allows 15 "
        )
        with nullcontext() if fits else refused:
            capabilities.check(program, prompt_len=10)


def test_rejects_captures_without_rows_of_earlier_stages() -> None:
    """Catches an incomplete capture that is delivered as complete. Edits alone are served."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig(), no_capture=NO_ROWS_OF_EARLIER_STAGES)
    edit = Edit(kind="add", point="post_block", layers=0, vector=[1.0] * 64)
    capabilities.check(compile_program([edit]), prompt_len=10)
    read = CaptureSpec(hooks={"post_block": [3]}, positions="all")
    with pytest.raises(SteeringError, match=r"capture: not supported here: with pipeline parallelism"):
        capabilities.check(compile_program([], [read]), prompt_len=10)


def test_checks_programs_per_engine() -> None:
    """Catches a checked program that another engine accepts unchecked, and lengths that are checked only once."""
    program = compile_program([Edit(kind="add", point="post_block", layers=3, vector=[1.0] * 64, tokens=[-5])])
    roomy = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    roomy.check(program, prompt_len=10)
    for _ in range(2):
        with pytest.raises(SteeringError, match="layer 3 does not exist"):
            Capabilities(3, 64, 1000, "float32", {}, SteeringConfig()).check(program, prompt_len=10)
    no_edits = Capabilities(4, 64, 1000, "float32", {"post_block": {3: "a reason"}}, SteeringConfig())
    for _ in range(2):
        with pytest.raises(SteeringError, match="not supported at layer 3: a reason"):
            no_edits.check(program, prompt_len=10)
    with pytest.raises(SteeringError, match="tokens"):
        roomy.check(program, prompt_len=4)


def test_remembers_live_programs_only() -> None:
    """Catches a cache of checked programs that grows forever, and one that forgets live programs."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    for i in range(3):
        capabilities.check(compile_program([Edit(kind="add", point="post_block", layers=i, vector=[1.0] * 64)]), 10)
    gc.collect()
    assert not capabilities._checked
    program = compile_program([Edit(kind="add", point="post_block", layers=1, vector=[1.0] * 64)])
    capabilities.check(program, 10)
    assert list(capabilities._checked.values()) == [program]


def test_names_the_layers_of_the_model() -> None:
    """Catches an error over HTTP that states the range of layers of any model instead of the range of this one."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    with pytest.raises(SteeringError) as caught:
        CaptureSpec(hooks={"post_block": [-1]})
    assert "less than 4, this model's number of layers, not -1" in str(capabilities.with_layers(caught.value))
    other = SteeringError("a", "is wrong")
    assert capabilities.with_layers(other) is other

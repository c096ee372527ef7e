# SPDX-License-Identifier: Apache-2.0
"""Tests of the check of programs against an engine's limits."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from vllm_steer import CaptureSpec, Edit, SamplingParams, SteeringConfig, SteeringError
from vllm_steer.capture.server_wide import with_captures
from vllm_steer.engine.admission import AdmissionController, most_rows, rows_for
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.frontend.context import NO_ROWS_OF_EARLIER_STAGES
from vllm_steer.params import program_of
from vllm_steer.program import Program, TableAllocator, compile_program, resolve
from vllm_steer.request import parse_capture, parse_readouts


def test_rejects_captures_beyond_the_budget() -> None:
    """Catches a request that would wait forever: 4 layers x 64 float32 values are 1 KiB per position."""
    capabilities = Capabilities(4, 64, 100000, "float32", {}, SteeringConfig(capture_mib=1))
    program = compile_program([], [CaptureSpec(hooks={"post_block": "all"}, positions="all")])
    capabilities.check(program, prompt_len=1000, max_tokens=25)
    with pytest.raises(SteeringError, match="needs up to 1 MiB; the engine allows 1 "):
        capabilities.check(program, prompt_len=1000, max_tokens=26)
    capabilities.check(program, prompt_len=1000)


def test_accepts_what_the_scheduler_can_admit() -> None:
    """Catches a capture that fits in bytes, but not in whole rows: it would wait forever, and block later requests."""
    config = SteeringConfig(capture_mib=1)
    capabilities = Capabilities(3, 48, 200000, "bfloat16", {}, config)
    program = compile_program(
        [], [CaptureSpec(hooks={"post_block": [0]}, positions="all_prompt", reduce={"directions": np.ones((3, 48))})]
    )
    row_bytes = 48 * 2
    for prompt_len, fits in ((87376, True), (87377, False)):
        resolved = resolve(program, prompt_len, 3)
        num_bytes = resolved.total_bytes(prompt_len, 1, row_bytes)
        assert num_bytes <= 1 << 20
        scheduler = AdmissionController(TableAllocator(8, 64, 8), most_rows(1, row_bytes), 0)
        assert scheduler.admit("r", resolved, rows_for(num_bytes, row_bytes)) == fits
        with nullcontext() if fits else pytest.raises(SteeringError, match=r"^capture: needs up to 1 MiB"):
            capabilities.check(program, prompt_len, max_tokens=1)


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
    with pytest.raises(SteeringError, match=r"capture: not supported here with pipeline parallelism"):
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


def test_programs_with_other_vectors_are_checked_for_their_own() -> None:
    """Catches a program that is served unchecked because the one that it was made from was checked, or was not."""
    capabilities = Capabilities(4, 64, 1000, "float16", {"post_block": {2: "a reason"}}, SteeringConfig())
    for layer, problem in ((1, "overflows float16"), (2, "a reason"), (4, "does not exist")):
        outline = compile_program([Edit(kind="add", point="post_block", layers=layer, vector=[1.0] * 64)])
        if layer == 1:
            capabilities.check(outline, 10)
        program = outline.with_vectors({0: np.full(64, 1e5, "<f4").tobytes()})
        assert program is not None and program.outline is outline
        for _ in range(2):
            with pytest.raises(SteeringError, match=problem):
                capabilities.check(program, 10)


def positions_program(tokens: Any, path: str = "steering[0]") -> Program:
    edit = Edit(kind="add", point="post_block", layers=0, vector=[1.0] * 64, tokens=tokens)
    return compile_program([edit], edit_paths=[path])


@pytest.mark.parametrize(
    ("tokens", "position"),
    [([500], 500), ([3, 500], 500), ([[13, 20]], 13), ([[13, None]], 13), (range(20, 30), 20), ([13], 13), ([12], None),
     ([[5, 100]], None), ([[12, None]], None), ("generated", None), ([-1], None)],
)  # fmt: skip
def test_rejects_positions_that_no_token_reaches(tokens: Any, position: int | None) -> None:
    """Catches an edit that cannot act and is accepted. The last of 10 + 4 tokens is not run, so 12 is the last one."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    program = positions_program(tokens)
    capabilities.check(program, prompt_len=10)
    if position is None:
        capabilities.check(program, prompt_len=10, max_tokens=4)
        return
    message = (
        rf"^steering\[0\].tokens: position {position} is out of reach: with 10 prompt tokens and max_tokens=4, 12 is"
    )
    with pytest.raises(SteeringError, match=message):
        capabilities.check(program, prompt_len=10, max_tokens=4)


def test_rejects_readouts_that_no_token_reaches() -> None:
    """Catches a readout that can have no value and is accepted."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    for positions, reached in (([12], True), ([[5, 100]], True), ([500], False)):
        probe = {"probe": [1.0] * 64, "point": "post_block", "layer": 1, "positions": positions}
        program = compile_program([], readouts=parse_readouts({"score": probe}))
        refused = pytest.raises(SteeringError, match=r"^readouts.score.positions: position 500 is out of reach")
        with nullcontext() if reached else refused:
            capabilities.check(program, prompt_len=10, max_tokens=4)


def test_the_model_s_length_bounds_positions() -> None:
    """Catches a position beyond `max_model_len` - 2, which a request with a large `max_tokens` never reaches."""
    capabilities = Capabilities(4, 64, 100, "float32", {}, SteeringConfig())
    capabilities.check(positions_program([98]), prompt_len=10, max_tokens=5000)
    with pytest.raises(SteeringError, match="98 is the last"):
        capabilities.check(positions_program([99]), prompt_len=10, max_tokens=5000)


@pytest.mark.parametrize("path", ["steering_modules[0]", "global steering"])
def test_modules_and_global_steering_may_be_out_of_reach(path: str) -> None:
    """Catches a module or global steering that makes short requests fail."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    capabilities.check(positions_program([500], path), prompt_len=10, max_tokens=4)


def test_server_wide_captures_may_be_out_of_reach() -> None:
    """Catches a server-wide capture that makes short requests fail; the same capture of a request is refused."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    specs = parse_capture({"memory": {"hooks": {"post_block": [1]}, "positions": [500]}})
    capabilities.check(program_of(with_captures(SamplingParams(), specs)), prompt_len=10, max_tokens=4)
    own = program_of(SamplingParams(capture=dict(specs)))
    with pytest.raises(SteeringError, match=r"^capture.memory.positions: position 500 is out of reach"):
        capabilities.check(own, prompt_len=10, max_tokens=4)


def test_names_the_layers_of_the_model() -> None:
    """Catches an error over HTTP that states the range of layers of any model instead of the range of this one."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig())
    with pytest.raises(SteeringError) as caught:
        CaptureSpec(hooks={"post_block": [-1]})
    assert "less than 4, this model's number of layers, not -1" in str(capabilities.with_layers(caught.value))
    other = SteeringError("a", "is wrong")
    assert capabilities.with_layers(other) is other

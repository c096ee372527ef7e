# SPDX-License-Identifier: Apache-2.0
"""What is refused because it can never fit, by the numbers alone."""

from __future__ import annotations

import pytest

from vllm_steer import CaptureSpec, Edit, SteeringConfig, SteeringError
from vllm_steer.capabilities import Capabilities
from vllm_steer.frontend import NO_ROWS_OF_EARLIER_STAGES
from vllm_steer.program import compile_program


def test_a_capture_beyond_the_budget_is_refused_by_its_largest_size() -> None:
    """Catches a request that would wait for ever: 4 layers x 64 numbers x 4 bytes are 1 KiB a position."""
    capabilities = Capabilities(4, 64, 100000, "float32", {}, SteeringConfig(capture_mib=1))
    program = compile_program([], [CaptureSpec(hooks={"post_block": "all"}, positions="all")])
    capabilities.check(program, prompt_len=1000, max_tokens=25)
    with pytest.raises(SteeringError, match="can never fit"):
        capabilities.check(program, prompt_len=1000, max_tokens=26)
    capabilities.check(program, prompt_len=1000)


def test_captures_are_refused_where_rows_of_earlier_stages_are_lost() -> None:
    """Catches half of a capture delivered as if it were all: edits alone are served there."""
    capabilities = Capabilities(4, 64, 1000, "float32", {}, SteeringConfig(), no_capture=NO_ROWS_OF_EARLIER_STAGES)
    edit = Edit(kind="add", point="post_block", layers=0, vector=[1.0] * 64)
    capabilities.check(compile_program([edit]), prompt_len=10)
    read = CaptureSpec(hooks={"post_block": [3]}, positions="all")
    with pytest.raises(SteeringError, match=r"capture: is not served: under pipeline parallelism"):
        capabilities.check(compile_program([], [read]), prompt_len=10)

# SPDX-License-Identifier: Apache-2.0
"""Hidden states of several prompts."""

from __future__ import annotations

import torch

from tests.capture.captured import captured
from vllm_steer.capture.hidden_states import HiddenStates

SITE = ("post_block", 3)


def test_rows_are_separate_for_each_prompt() -> None:
    """Catches rows of another prompt, wrong bounds, and prompts without rows that shift the others."""
    requests = tuple(captured(str(rows), seed=rows, rows=rows) for rows in (3, 0, 5))
    states = HiddenStates(requests)
    assert len(states) == 3 and [*states] == [*requests] and states[-1] is requests[2]
    bounds = states.bounds(*SITE)
    assert bounds.dtype == torch.int64 and bounds.tolist() == [0, 3, 3, 8]
    assert states.prompt_index(*SITE).tolist() == [0] * 3 + [2] * 5
    for i, (rows, request) in enumerate(zip(states.tensors(*SITE), requests, strict=True)):
        assert torch.equal(rows, request.tensor(*SITE))
        assert torch.equal(rows, states.tensor(*SITE)[bounds[i] : bounds[i + 1]])


def test_reduced_rows_have_one_row_per_prompt() -> None:
    """Catches bounds that count the positions that were read instead of the rows."""
    requests = tuple(captured(str(i), seed=i, rows=4, reduced=True) for i in range(3))
    assert HiddenStates(requests).bounds(*SITE).tolist() == [0, 1, 2, 3]
    assert HiddenStates(requests).prompt_index(*SITE).tolist() == [0, 1, 2]

# SPDX-License-Identifier: Apache-2.0
"""Rows of a capture as the rows of `replace`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests import memory
from vllm_steer import CaptureResult, Edit, SteeringError
from vllm_steer.capture.results import CapturedRequest, SiteRows
from vllm_steer.request import parse_capture

ROWS = torch.arange(12, dtype=torch.float32).reshape(4, 3) + 1
((_, SPEC),) = parse_capture({"memory": {"hooks": {"post_block": [1]}, "positions": "all_prompt"}})
SITE = SiteRows(np.arange(4), ROWS)
REQUEST = CapturedRequest("a", 0, "tiny", (5, 6, 7, 8), (9,), SPEC, {("post_block", 1): SITE}, "ok", None)
RESULT = CaptureResult("ok", None, REQUEST)
NO_ROWS = {("post_block", 1): SiteRows(np.arange(0), ROWS[:0])}
EMPTY = CaptureResult("ok", None, replace(REQUEST, sites=NO_ROWS))


def edit(source: Any = RESULT, **changes: Any) -> Edit:
    return Edit(**{"kind": "replace", "point": "post_block", "layers": 1, "vector": source, **changes})


def test_rows_by_position() -> None:
    """Catches rows one position off, or of another order."""
    assert edit().tokens.to_wire() == [[0, 4]] and np.array_equal(edit().vector, ROWS.numpy())
    assert np.array_equal(edit(tokens=[1, 3]).vector, ROWS.numpy()[[1, 3]])
    assert np.array_equal(edit(tokens=[0, -1]).vector, ROWS.numpy()[[0, 3]])
    assert np.array_equal(edit(tokens=[2]).vector, ROWS.numpy()[2])


@pytest.mark.parametrize(
    ("source", "changes", "field", "remedy"),
    [
        (CaptureResult("error", "the store is full", None), {}, "vector", "capture the rows again"),
        (replace(RESULT, status="partial", error="rows are missing"), {}, "vector", "capture the rows again"),
        (CaptureResult("ok", None, {"path": "a"}), {}, "vector", "capture them again"),
        (RESULT, {"layers": 2}, "vector", "its sites: post_block"),
        (RESULT, {"point": "pre_attn"}, "vector", "its sites: post_block"),
        (RESULT, {"layers": [1, 2]}, "layers", "one edit per layer"),
        (RESULT, {"tokens": [4]}, "tokens", "captured positions [0, 1, 2, 3]"),
        (RESULT, {"kind": "add"}, "vector", "use replace"),
        (EMPTY, {"tokens": [0]}, "vector", "positions that the request reaches"),
        (EMPTY, {}, "vector", "positions that the request reaches"),
    ],
)
def test_a_source_that_is_gone_is_an_error(source: Any, changes: dict[str, Any], field: str, remedy: str) -> None:
    """Catches an edit without rows that leaves the request unpatched, and a message without a remedy."""
    with pytest.raises(SteeringError) as refused:
        edit(source, **changes)
    assert refused.value.field == field
    assert remedy in refused.value.problem


def test_one_row_is_not_put_at_other_positions() -> None:
    """Catches the row of a prompt of one token at every token of a longer one, and that of one token at all later."""
    sites = {("post_block", 1): SiteRows(np.arange(1), ROWS[:1])}
    short = CaptureResult("ok", None, replace(REQUEST, prompt_token_ids=(5,), sites=sites))
    assert edit(short, tokens="prompt").num_rows == 1
    assert edit(short, tokens="last_prompt").num_rows is None
    with pytest.raises(SteeringError, match="has no end, but the matrix has 1 rows"):
        edit(tokens=[[3, None]])


@pytest.mark.parametrize("tokens", [[[0, 2_000_000_000]], [[2, 2_000_000_000]], range(2_000_000_000)])
def test_long_intervals_are_not_listed(tokens: Any) -> None:
    """Catches a short request that lists two billion positions, which fills the memory of a server."""
    with memory.at_most(256), pytest.raises(SteeringError, match="position 4 was not captured"):
        edit(tokens=tokens)

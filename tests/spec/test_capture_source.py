# SPDX-License-Identifier: Apache-2.0
"""Rows of a capture as the rows of `replace`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer import CaptureResult, Edit, SteeringError
from vllm_steer.capture.results import CapturedRequest, SiteRows
from vllm_steer.spec import parse_capture

ROWS = torch.arange(12, dtype=torch.float32).reshape(4, 3) + 1
((_, SPEC),) = parse_capture({"memory": {"hooks": {"post_block": [1]}, "positions": "all_prompt"}})
SITE = SiteRows(np.arange(4), ROWS)
REQUEST = CapturedRequest("a", 0, "tiny", (5, 6, 7, 8), (9,), SPEC, {("post_block", 1): SITE}, "ok", None)
RESULT = CaptureResult("ok", None, REQUEST)


def edit(source: Any = RESULT, **changes: Any) -> Edit:
    return Edit(**{"kind": "replace", "point": "post_block", "layers": 1, "vector": source, **changes})


def test_rows_by_position() -> None:
    """Catches rows one position off, or of another order."""
    assert edit().tokens.to_wire() == [[0, 4]] and np.array_equal(edit().vector, ROWS.numpy())
    assert np.array_equal(edit(tokens=[1, 3]).vector, ROWS.numpy()[[1, 3]])
    assert np.array_equal(edit(tokens=[0, -1]).vector, ROWS.numpy()[[0, 3]])
    assert np.array_equal(edit(tokens=[2]).vector, ROWS.numpy()[2])


@pytest.mark.parametrize(
    ("source", "changes", "field"),
    [
        (CaptureResult("error", "the store is full", None), {}, "vector"),
        (replace(RESULT, status="partial", error="rows are missing"), {}, "vector"),
        (CaptureResult("ok", None, {"path": "a"}), {}, "vector"),
        (RESULT, {"layers": 2}, "vector"),
        (RESULT, {"point": "pre_attn"}, "vector"),
        (RESULT, {"layers": [1, 2]}, "layers"),
        (RESULT, {"tokens": [4]}, "tokens"),
        (RESULT, {"kind": "add"}, "vector"),
    ],
)
def test_a_source_that_is_gone_is_an_error(source: Any, changes: dict[str, Any], field: str) -> None:
    """Catches an edit without rows that leaves the request unpatched."""
    with pytest.raises(SteeringError) as refused:
        edit(source, **changes)
    assert refused.value.field == field

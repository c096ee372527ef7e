# SPDX-License-Identifier: Apache-2.0
"""Assembly of rows from chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import HIDDEN, LAYERS, code_of
from vllm_steer.capture import row_assembler
from vllm_steer.capture.row_assembler import RowAssembler, RowChunk
from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.request import CaptureSpec, Projection


@pytest.mark.failure(9)
def test_last_row_of_a_recomputed_position_counts() -> None:
    """Catches rows that are appended chunk by chunk, which duplicates recomputed positions."""
    rows = torch.arange(7 * HIDDEN, dtype=torch.float32).view(7, HIDDEN)
    code = code_of("post_block", 1)
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    assembler.add(
        [
            RowChunk("r", 0, 4, (code,), rows[:4].numpy().tobytes()),
            RowChunk("r", 2, 3, (code,), rows[4:].numpy().tobytes()),
        ]
    )
    spec = CaptureSpec(hooks={"post_block": [1]}, positions="all")
    sites, missing = assembler.assemble(spec, 3, 6)
    site = sites["post_block", 1]
    assert missing is None
    assert site.positions.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(site.rows, rows[[0, 1, 4, 5, 6]])
    assert sum(chunk.count for chunk in assembler._chunks) == 7


def test_records_are_as_wide_as_the_narrowest_step() -> None:
    """Catches records of steps with other requests, whose columns differ in number, and an old record of a token."""
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    for start, values in ((0, [[1, 2, 0], [3, 4, 0]]), (1, [[5, 6], [7, 8]]), (3, [[9, 10, 0, 0]])):
        records = np.array(values, np.float32)
        assembler.add([RowChunk("r", start, len(values), (records.shape[1],), records.tobytes(), RECORDS)])
    positions, found = assembler.records(3)
    assert (positions.tolist(), found.tolist()) == ([0, 1, 2], [[1, 2], [5, 6], [7, 8]])
    assert [assembler.since(number, forwarded)[1] for number, forwarded in ((0, 1), (1, 3), (1, 4))] == [0, 2, 3]


def test_incomplete_sample_is_partial() -> None:
    """Catches status ok for (1) a request aborted within its prompt and (2) one aborted after its last captured row."""
    last = CaptureSpec(hooks={"post_block": [1]}, positions="last_prompt")
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    assembler.incomplete_reason = "it was aborted"
    sites, missing = assembler.assemble(last, 3, 3)
    assert missing == "it was aborted: post_block[1] has 0 of 1 positions"
    assert len(sites["post_block", 1].positions) == 0
    rows = torch.zeros(5, HIDDEN).numpy().tobytes()
    assembler.add([RowChunk("r", 0, 5, (code_of("post_block", 1),), rows)])
    sites, missing = assembler.assemble(last, 3, 6)
    assert missing == "it was aborted"
    assert sites["post_block", 1].positions.tolist() == [2]
    complete = RowAssembler(LAYERS, HIDDEN, torch.float32)
    assert complete.assemble(CaptureSpec(hooks={"post_block": [1]}, positions="all_generated"), 3, 4)[1] is None


def test_sites_with_different_chunks_and_columns() -> None:
    """Catches (1) rows chosen by another site's chunks, (2) a column of another chunk, (3) shared position arrays."""
    rng = np.random.default_rng(0)
    all_codes = first, second, third, fourth = [code_of("post_block", layer) for layer in range(LAYERS)]
    layout = [
        (0, 4, (first, second, fourth)),
        (4, 2, (first, fourth)),
        (1, 2, (second, fourth, first)),
        (4, 3, (third, second)),
    ]
    expected: dict[int, dict[int, torch.Tensor]] = {code: {} for code in all_codes}
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    for start, count, codes in layout:
        rows = torch.from_numpy(rng.standard_normal((count, len(codes), HIDDEN)).astype("f4"))
        for column, code in enumerate(codes):
            expected[code].update({start + i: rows[i, column] for i in range(count)})
        assembler.add([RowChunk("r", start, count, codes, rows.numpy().tobytes())])
    sites, missing = assembler.assemble(CaptureSpec(hooks={"post_block": "all"}, positions=[(1, 6)]), 8, 9)
    assert missing == "post_block[2] has 2 of 5 positions"
    for layer, code in enumerate(all_codes):
        wanted = {position: row for position, row in sorted(expected[code].items()) if 1 <= position < 6}
        site = sites["post_block", layer]
        assert site.positions.tolist() == list(wanted)
        assert torch.equal(site.rows, torch.stack(list(wanted.values())))
        site.positions[:] = -1


@pytest.mark.parametrize("reduce", [None, "mean", "last", {"directions": [[1.0] * HIDDEN]}])
def test_overflow_is_reported(reduce: Any) -> None:
    """Catches status ok for rows or projections that become infinite in float16."""
    assembler = RowAssembler(LAYERS, HIDDEN, torch.bfloat16)
    rows = torch.full((3, HIDDEN), 7e4, dtype=torch.bfloat16)
    spec = CaptureSpec(hooks={"post_block": [1]}, positions="all", dtype="float16", reduce=reduce)
    data, projection = rows.view(torch.uint8).numpy(), b""
    if isinstance(spec.reduce, Projection):
        data, projection = rows.float().sum(1, keepdim=True).numpy().view(np.uint8), spec.reduce.digest
    assembler.add([RowChunk("r", 0, 3, (code_of("post_block", 1),), data, projection)])
    assert assembler.assemble(spec, 2, 4)[1] == ("post_block[1] overflows float16 (infinities); use dtype float32")
    wide = CaptureSpec(hooks={"post_block": [1]}, positions="all", dtype="float32", reduce=spec.reduce)
    sites, problem = assembler.assemble(wide, 2, 4)
    assert problem is None
    assert bool(sites["post_block", 1].rows.isfinite().all())


def test_infinities_of_the_model_are_not_overflow() -> None:
    """Catches infinite rows of the model reported as an overflow of the conversion."""
    assembler = RowAssembler(LAYERS, HIDDEN, torch.bfloat16)
    rows = torch.full((1, HIDDEN), float("inf"), dtype=torch.bfloat16)
    assembler.add([RowChunk("r", 0, 1, (code_of("post_block", 1),), rows.view(torch.uint8).numpy())])
    spec = CaptureSpec(hooks={"post_block": [1]}, positions="all", dtype="float16")
    assert assembler.assemble(spec, 1, 2)[1] is None


@pytest.mark.parametrize("dtype", ["float16", "float32", None])
def test_joint_conversion_is_the_conversion_of_each_site(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """Catches rows of another site, a site's overflow named for another one, and rows that keep others alive."""
    rng = np.random.default_rng(1)
    rows = torch.from_numpy(rng.standard_normal((3, 3, HIDDEN)).astype("f4"))
    rows[2, 1, 0], rows[1, 2, 1] = 7e4, float("inf")
    codes = tuple(code_of("post_block", layer) for layer in range(3))
    spec = CaptureSpec(hooks={"post_block": [0, 1, 2]}, positions="all", dtype=dtype)
    found = []
    for limit in (1 << 20, 0):
        monkeypatch.setattr(row_assembler, "_JOINT_BYTES", limit)
        assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
        assembler.add([RowChunk("r", 0, 3, codes, rows.view(torch.uint8).numpy())])
        found.append(assembler.assemble(spec, 2, 4))
    (joint, problem), (separate, expected) = found
    assert problem == expected
    assert (problem or "").startswith("post_block[1] overflows") == (dtype == "float16")
    assert list(joint) == list(separate)
    for site, each in joint.items():
        assert torch.equal(each.rows, separate[site].rows)
        assert each.rows.untyped_storage().nbytes() == each.rows.nbytes

# SPDX-License-Identifier: Apache-2.0
"""Rows from chunks: by position, each once, the last one counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import HIDDEN, LAYERS, code_of
from vllm_steer.capture.row_assembler import RowAssembler, RowChunk
from vllm_steer.spec import CaptureSpec, Projection


@pytest.mark.failure(9)
def test_recomputed_positions_count_once_and_the_last_time() -> None:
    """Catches rows appended as chunks come, which have the recomputed positions twice."""
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
    got = sites["post_block", 1]
    assert missing is None
    assert got.positions.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(got.rows, rows[[0, 1, 4, 5, 6]])
    assert sum(chunk.count for chunk in assembler._chunks) == 7


def test_a_sample_that_was_cut_misses_what_was_not_computed() -> None:
    """Catches no row, of a request that ended before its prompt was through, as all that it asked for; and a request
    that was cut behind what it has, taken for one that went on to its end."""
    last = CaptureSpec(hooks={"post_block": [1]}, positions="last_prompt")
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    assembler.mark_incomplete("it was aborted")
    sites, missing = assembler.assemble(last, 3, 3)
    assert missing == "it was aborted: post_block[1] has 0 of 1 positions"
    assert len(sites["post_block", 1].positions) == 0
    rows = torch.zeros(5, HIDDEN).numpy().tobytes()
    assembler.add([RowChunk("r", 0, 5, (code_of("post_block", 1),), rows)])
    sites, missing = assembler.assemble(last, 3, 6)
    assert missing == "it was aborted"
    assert sites["post_block", 1].positions.tolist() == [2]
    whole = RowAssembler(LAYERS, HIDDEN, torch.float32)
    assert whole.assemble(CaptureSpec(hooks={"post_block": [1]}, positions="all_generated"), 3, 4)[1] is None


def test_sites_that_came_in_other_chunks_and_places() -> None:
    """Catches rows chosen for one site by another's chunks, a site's place in one chunk used in another, and positions
    of one site that change with another's."""
    rng = np.random.default_rng(0)
    codes_of = first, second, third, beside = [code_of("post_block", layer) for layer in range(LAYERS)]
    layout = [
        (0, 4, (first, second, beside)),
        (4, 2, (first, beside)),
        (1, 2, (second, beside, first)),
        (4, 3, (third, second)),
    ]
    right: dict[int, dict[int, torch.Tensor]] = {code: {} for code in codes_of}
    assembler = RowAssembler(LAYERS, HIDDEN, torch.float32)
    for start, count, codes in layout:
        rows = torch.from_numpy(rng.standard_normal((count, len(codes), HIDDEN)).astype("f4"))
        for place, code in enumerate(codes):
            right[code].update({start + i: rows[i, place] for i in range(count)})
        assembler.add([RowChunk("r", start, count, codes, rows.numpy().tobytes())])
    sites, missing = assembler.assemble(CaptureSpec(hooks={"post_block": "all"}, positions=[(1, 6)]), 8, 9)
    assert missing == "post_block[2] has 2 of 5 positions"
    for layer, code in enumerate(codes_of):
        wanted = {position: row for position, row in sorted(right[code].items()) if 1 <= position < 6}
        got = sites["post_block", layer]
        assert got.positions.tolist() == list(wanted)
        assert torch.equal(got.rows, torch.stack(list(wanted.values())))
        got.positions[:] = -1


@pytest.mark.parametrize("reduce", [None, "mean", "last", {"directions": [[1.0] * HIDDEN]}])
def test_numbers_that_the_dtype_does_not_have_are_told(reduce: Any) -> None:
    """Catches numbers of the model's that come as infinities with status ok: of large rows that were asked for in
    float16, and, in a float16 model, of their products with directions."""
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


def test_infinities_of_the_model_itself_are_rows() -> None:
    """Catches a model that overflowed, whose rows are what they are, taken for a conversion that did."""
    assembler = RowAssembler(LAYERS, HIDDEN, torch.bfloat16)
    rows = torch.full((1, HIDDEN), float("inf"), dtype=torch.bfloat16)
    assembler.add([RowChunk("r", 0, 1, (code_of("post_block", 1),), rows.view(torch.uint8).numpy())])
    spec = CaptureSpec(hooks={"post_block": [1]}, positions="all", dtype="float16")
    assert assembler.assemble(spec, 1, 2)[1] is None

# SPDX-License-Identifier: Apache-2.0
"""Plans of captured rows, and their transfer in every format. Arena values identify request, position and site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import code_of
from vllm_steer.capture.step_plan import CaptureBatch, CapturePlan, SteadyCaptureBatch, UncertainPlan, make_row_streams
from vllm_steer.capture.step_rows import StepRows, decode_row_index
from vllm_steer.engine.device_to_host import DeviceToHostCopier, PendingRows, Transfer
from vllm_steer.engine.row_capture import RowCapture
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.program import Resolved, compile_program, resolve
from vllm_steer.request import CaptureSpec, Projection, parse_readouts

HIDDEN, LAYERS, PROMPT = 16, 3, 4
RNG = np.random.default_rng(5)
ONE, OTHER = (Projection(RNG.standard_normal((k, HIDDEN)).astype("f4")) for k in (3, 2))
SPECS: Mapping[str, tuple[CaptureSpec, ...]] = {
    "rows": (CaptureSpec(hooks={"post_block": "all"}, positions="all"),),
    "projected": (CaptureSpec(hooks={"post_block": [0, 2]}, positions="all", reduce=ONE),),
    # Rows and two projections of the same site, and a projection of another point for the prompt only.
    "several": (
        CaptureSpec(hooks={"post_block": [1]}, positions="all"),
        CaptureSpec(hooks={"post_block": [1, 2]}, positions="all", reduce=OTHER),
        CaptureSpec(hooks={"post_block": [1]}, positions="all", reduce=ONE),
        CaptureSpec(hooks={"pre_attn": [0]}, positions="all_prompt", before=True, reduce=ONE),
    ),
    # Rows of a lens do not leave.
    "lens": (CaptureSpec(hooks={"post_block": [1]}, positions="all"),),
}
READOUTS = {"lens": parse_readouts({"top": {"lens": {"top_k": 2}, "point": "post_block", "layers": [0, 2]}})}
DIRECTIONS = {projection.digest: torch.from_numpy(projection.directions.copy()) for projection in (ONE, OTHER)}


def resolved(name: str) -> Resolved:
    return resolve(compile_program([], SPECS[name], readouts=READOUTS.get(name, {})), PROMPT, LAYERS)


def value(name: str, position: int, code: int) -> torch.Tensor:
    """Return the row that a request stores at a position and site."""
    seed = 1000 * list(SPECS).index(name) + 30 * position + code
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(HIDDEN).astype("f4"))


def arena(batch: Mapping[str, tuple[int, int]], room: int = 64) -> torch.Tensor:
    """Return the arena after a batch, given by first position and number of tokens; the rest is NaN."""
    rows = []
    for name, (first, count) in batch.items():
        for position in range(first, first + count):
            for _, _, segment in resolved(name).spans(position, position + 1):
                captures = segment.program.captures if segment.program else ()
                rows += [value(name, position, captured.code) for captured in captures]
    stored = torch.full((room, HIDDEN), torch.nan)
    stored[: len(rows)] = torch.stack(rows)
    return stored


def check(steps: tuple[StepRows, ...], batch: Mapping[str, tuple[int, int]]) -> None:
    """Check that every format of every position of every request is present once, with its own values."""
    found: dict[tuple[str, int, int, bytes], torch.Tensor] = {}
    for step in steps:
        index = decode_row_index(step.index.encoded)
        assert (index.request_ids, index.codes, index.projection) == (
            step.index.request_ids, step.index.codes, step.index.projection
        )  # fmt: skip
        for i, (name, codes) in enumerate(zip(index.request_ids, index.codes, strict=True)):
            rows = torch.from_numpy(step.rows_of(i).copy()).view(torch.float32).view(int(step.count[i]), len(codes), -1)
            for token in range(int(step.count[i])):
                for column, code in enumerate(codes):
                    key = (name, int(step.start[i]) + token, code, index.projection)
                    assert key not in found
                    found[key] = rows[token, column]
    wanted: dict[tuple[str, int, int, bytes], torch.Tensor] = {}
    for name, (first, count) in batch.items():
        for spec in SPECS[name]:
            last = PROMPT if spec.tokens.to_wire() == "prompt" else first + count
            for position in range(first, min(first + count, last)):
                for point, layers in spec.hooks:
                    for layer in range(LAYERS) if layers == "all" else layers:
                        code = code_of(point, layer, before=spec.before)
                        row = value(name, position, code)
                        if isinstance(spec.reduce, Projection):
                            key, row = spec.reduce.digest, DIRECTIONS[spec.reduce.digest] @ row
                        else:
                            key = b""
                        wanted[name, position, code, key] = row
    assert found.keys() == wanted.keys()
    for each, row in wanted.items():
        torch.testing.assert_close(found[each], row, atol=1e-5, rtol=1e-5)


def transfers(plan: CapturePlan) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(each.index.projection, each.arena_rows, DIRECTIONS.get(each.index.projection)) for each in plan.streams
    )


def capture_batch(batch: Mapping[str, tuple[int, int]]) -> CaptureBatch:
    count = np.array([count for _, count in batch.values()], dtype=np.int64)
    return CaptureBatch(tuple(batch), tuple(map(resolved, batch)), count)


def plan_of(batch: Mapping[str, tuple[int, int]]) -> CapturePlan:
    return capture_batch(batch).plan_at([first for first, _ in batch.values()])


CHUNKS = {"rows": (2, 3), "several": (2, 5), "projected": (0, 4)}
DECODING = {"several": (9, 1), "projected": (4, 1), "rows": (30, 1)}


@pytest.mark.parametrize(
    "batch",
    [
        CHUNKS,
        DECODING,
        {"projected": (0, 7)},
        {"rows": (0, 2)},
        {"several": (3, 1), "rows": (0, 1)},
        {"several": (9, 1), "rows": (30, 1)},  # one row of the step is not among the rows that leave whole
        {"lens": (3, 2)},
        {"rows": (1, 2), "lens": (5, 1)},
    ],
)
def test_every_format_of_every_row_is_transferred_once(batch: Mapping[str, tuple[int, int]]) -> None:
    """Catches projections of a neighbour's rows, projections that were not requested, and swapped formats."""
    plan = plan_of(batch)
    check(
        DeviceToHostCopier(torch.device("cpu"))
        .start(arena(batch)[: plan.num_rows], None, plan, transfers(plan))
        .wait(),
        batch,
    )


def test_transferred_rows_do_not_share_the_buffer() -> None:
    """Catches rows of a later step: buffers are reused as soon as they are released."""
    batch = {"rows": (0, 2)}
    plan = plan_of(batch)
    buffer = arena(batch)[: plan.num_rows].view(torch.uint8)

    def overwrite() -> None:
        buffer.fill_(255)

    check(PendingRows(plan, {b"": buffer}, release=overwrite).wait(), batch)
    assert (buffer == 255).all()


def test_projections_are_computed_in_float32() -> None:
    """Catches projections that are rounded to bfloat16."""
    batch = {"projected": (0, 4)}
    plan = plan_of(batch)
    stored = arena(batch)[: plan.num_rows].to(torch.bfloat16)
    form = next(form for form in transfers(plan) if form.directions is not None)
    (rows,) = DeviceToHostCopier(torch.device("cpu")).start(stored, None, plan, (form,)).rows.values()
    chosen = stored if form.rows is None else stored[torch.from_numpy(form.rows)]
    torch.testing.assert_close(rows.view(torch.float32), chosen.float() @ form.directions.T, atol=1e-6, rtol=1e-6)


def test_steady_batch_with_changing_token_counts() -> None:
    """Catches a cached plan used for steps with other numbers of tokens."""
    names = tuple(DECODING)
    steady = SteadyCaptureBatch(names, tuple(resolved(name).segments[-1].program for name in names))
    copier = DeviceToHostCopier(torch.device("cpu"))
    for batch in (DECODING, {"several": (10, 1), "projected": (5, 1), "rows": (31, 1)},
                  {"several": (11, 2), "projected": (6, 1), "rows": (32, 2)}, DECODING):  # fmt: skip
        first, count = (np.array([each[i] for each in batch.values()], dtype=np.int64) for i in (0, 1))
        plan = steady.plan(first, count)
        check(copier.start(arena(batch)[: plan.num_rows], None, plan, transfers(plan)).wait(), batch)


def test_device_positions_decide_with_drafts() -> None:
    """Catches formats chosen by the host's positions, which run ahead: here the device is still in the prompt."""
    batch = {"projected": (5, 2), "several": (2, 3), "rows": (1, 2)}
    ahead = {name: (first + 3, count) for name, (first, count) in batch.items()}
    captures = capture_batch(ahead)
    position = torch.cat([torch.arange(first, first + count) for first, count in batch.values()])
    stored = arena(batch)[: captures.max_captured_rows()]
    copier = DeviceToHostCopier(torch.device("cpu"))
    plan = UncertainPlan(np.cumsum(captures.count) - captures.count, captures.plan_at)
    every = tuple(Transfer(each, None, DIRECTIONS.get(each)) for each in captures.projections())
    check(copier.start(stored, position, plan, every).wait(), batch)
    wrong = plan_of(ahead)
    with pytest.raises(AssertionError):
        check(copier.start(stored, None, wrong, transfers(wrong)).wait(), batch)


@pytest.mark.parametrize("name", SPECS)
def test_spans_with_one_program(name: str) -> None:
    """Catches spans of equal programs whose rows, codes or formats differ from those of spans with several programs."""
    program = resolved(name).segments[-1].program
    assert program is not None
    programs = [program, replace(program, digest=b"1"), replace(program, digest=b"2")]
    count = np.array([2, 1, 3])
    one, several = (make_row_streams(("a", "b", "c"), each, count) for each in ([program] * 3, programs))
    for ours, theirs in zip(one, several, strict=True):
        assert ours.index == theirs.index
        np.testing.assert_array_equal(ours.spans, theirs.spans)
        np.testing.assert_array_equal(*(np.arange(6) if x.arena_rows is None else x.arena_rows for x in (ours, theirs)))


@pytest.mark.parametrize("ahead", [0, 3], ids=["certain", "drafts"])
def test_rows_of_consecutive_steps(ahead: int) -> None:
    """Catches the plan of an earlier step or of another order of the batch, and tokens of a request without captures.

    With drafts, the host's positions are ahead of the device's.
    """
    slots = {name: slot for slot, name in enumerate(("plain", *SPECS))}
    last = np.array([0, *(resolved(name).segments[-1].start for name in SPECS)])
    programs = np.array([None, *(resolved(name).segments[-1].program for name in SPECS)], dtype=object)
    tables = SimpleNamespace(arena=torch.empty(0))
    store: Any = SimpleNamespace(
        changes=1, resolved_of=resolved, directions=DIRECTIONS.__getitem__, tables=tables, last_segment=last,
        last_program=programs,
    )  # fmt: skip
    rows = RowCapture(store, DeviceToHostCopier(torch.device("cpu")), enabled=True, speculative=ahead > 0)
    other = {name: DECODING[name] for name in reversed(DECODING)}
    for batch in (
        CHUNKS,
        DECODING,
        other,
        {"several": (3, 2), "lens": (9, 1)},
        {"several": (5, 2), "lens": (9, 1)},
        {"rows": (0, 2)},
    ):
        first, count = (np.array([7 - 5 * i, *(each[i] for each in batch.values())], dtype=np.int64) for i in (0, 1))
        layout: Any = SimpleNamespace(
            position=torch.from_numpy(np.concatenate(list(map(np.arange, first, first + count))))
        )
        tables.arena, ids = arena(batch), ["plain", *batch]
        slot = np.array([slots[name] for name in ids])
        rows.plan(StepBatch(lambda: layout, ids, slot, first + ahead, count, 64), np.arange(1, len(ids)))  # noqa: B023
        rows.start_copy()
        (pending,) = rows.take_rows()
        check(pending.wait(), batch)
        assert rows.take_rows() == ()

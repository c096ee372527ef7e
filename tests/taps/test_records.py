# SPDX-License-Identifier: Apache-2.0
"""State of conditions: the definition against a loop over tokens, and the kernels against the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer import SteeringConfig
from vllm_steer.program import instructions as ops
from vllm_steer.program import records as kinds
from vllm_steer.program.records import DeviceCondition
from vllm_steer.taps import records as step_records
from vllm_steer.taps.assignment import BatchLayout
from vllm_steer.taps.reference import apply_tap
from vllm_steer.taps.tables import Tables

REQUESTS, CONDITIONS, COLUMNS, DRAFTS, TOKENS, HIDDEN = 5, 11, 12, 2, 64, 48
PART_COLUMN = 10
IDS = range(40, 46)
"""Token ids, none of which is a column."""
OPEN = 2**31 - 1


def make_tables(device: str = "cpu") -> Tables:
    config = SteeringConfig(max_conditions=CONDITIONS, record_columns=COLUMNS - 1, capture_rows=8)
    return Tables(
        config, num_sites=3, hidden_size=HIDDEN, max_tokens=TOKENS, max_requests=REQUESTS, dtype=torch.float32,
        device=torch.device(device), drafts=DRAFTS,
    )  # fmt: skip


def conditions(rng: np.random.Generator) -> list[DeviceCondition]:
    """Return conditions of every kind with state, in random order."""
    drawn = rng.permutation(np.arange(kinds.PREVIOUS, kinds.STOP + 1))
    masked = rng.integers(0, 2, len(drawn)) * PART_COLUMN
    return [
        part(rng) if kind == kinds.PART else DeviceCondition(
            kind=int(kind), score=int(rng.integers(1, 5)), target=0 if kind == kinds.STOP else int(rng.integers(6, 10)),
            first=int(rng.integers(0, 6)),
            stop=OPEN if kind in (kinds.PREVIOUS, kinds.LATCH, kinds.STOP) else int(rng.integers(8, 20)),
            count=int(rng.integers(1, 4)), start=int(rng.integers(5, 12)), number=int(rng.integers(1, 4)),
            threshold=float(rng.normal() * 0.3), sign=float(rng.choice([-1, 1])),
            sharpness=float(rng.choice([0.0, 2.0])) if kind != kinds.LATCH else 0.0,
            release=float(rng.normal()), release_sign=float(rng.choice([-1, 0, 1])),
            alpha=float(np.float32(rng.uniform(0.1, 0.9))),
            mask=0 if kind in (kinds.MEAN, *kinds.OF_PROMPT) else int(mask),
        )
        for kind, mask in zip(drawn, masked, strict=True)
    ]  # fmt: skip


def part(rng: np.random.Generator) -> DeviceCondition:
    """Return the condition of a part of the output, from a start token to an end token or a break."""
    start, end, *breaks = rng.permutation(IDS)[:4]
    breaks = [int(each) if rng.integers(0, 2) else kinds.NO_TOKEN for each in breaks]
    first = int(rng.integers(3, 6))
    return DeviceCondition(
        kind=kinds.PART, score=int(start), target=PART_COLUMN, first=first, stop=OPEN, count=int(end), start=first,
        number=int(rng.integers(0, 2)), threshold=0.0, sign=1.0, sharpness=0.0, release=0.0, release_sign=0.0,
        opened=bool(rng.integers(0, 2)), breaks=tuple(breaks),
    )  # fmt: skip


def write(tables: Tables, slot: int, made: list[DeviceCondition]) -> None:
    for c, each in enumerate(made):
        tables.condition[slot, c] = torch.tensor(each.fields)
        tables.bound[slot, c] = torch.tensor(each.numbers)
        tables.carry[slot, :, c] = each.initial_state


def state_of(each: DeviceCondition, scores: np.ndarray) -> float:
    """Return the state after all positions, by a loop; the last column of ``scores`` is the token."""
    state = each.initial_state
    if each.kind == kinds.PART:
        for token in scores[each.first :, -1]:
            state = 1.0 if token == each.score else 0.0 if token in (each.count, *each.breaks) else state
        return state
    for position, score in enumerate(scores[:, each.score].astype(float)):
        if not each.first <= position < each.stop or (each.mask and not scores[position, each.mask]):
            continue
        holds = each.sign * (score - each.threshold) > 0
        if each.kind in (kinds.PREVIOUS, kinds.PROMPT_LAST):
            state = score
        elif each.kind in (kinds.PROMPT_MEAN, kinds.MEAN):
            state += score
        elif each.kind == kinds.EMA:
            state = score if np.isnan(state) else state + each.alpha * (score - state)
        elif each.kind in (kinds.PROMPT_MAX, kinds.MAX):
            state = max(state, score)
        elif each.kind in (kinds.STOP, kinds.HELD):
            state = state + 1 if holds else 0.0
        elif holds:
            state = 1.0
        elif each.release_sign * (score - each.release) > 0:
            state = 0.0
    return float(state)


def steps(rng: np.random.Generator) -> Any:
    """Yield layouts of steps in which requests start at different times and some drafts are rejected."""
    final = np.zeros(REQUESTS, dtype=int)
    for _ in range(12):
        chosen = rng.permutation(REQUESTS)[: rng.integers(1, REQUESTS + 1)]
        counts = [int(rng.integers(1, 12)) if final[slot] < 8 else int(rng.integers(1, DRAFTS + 2)) for slot in chosen]
        start = np.concatenate([[0], np.cumsum(counts)])
        position = np.concatenate([final[s] + np.arange(n) for s, n in zip(chosen, counts, strict=True)])
        yield (
            chosen,
            counts,
            BatchLayout(
                torch.tensor(chosen),
                torch.tensor(start, dtype=torch.int32),
                torch.tensor(position),
                torch.from_numpy(rng.choice(IDS, len(position))).int(),
            ),
        )
        for slot, count in zip(chosen, counts, strict=True):
            rejected = int(rng.integers(0, min(count, DRAFTS + 1))) if final[slot] >= 8 else 0
            final[slot] += count - rejected


@pytest.mark.parametrize("seed", range(6))
def test_state_equals_a_loop_over_accepted_tokens(seed: int) -> None:
    """Catches state of rejected drafts, of other requests, and steps that are folded twice."""
    rng = np.random.default_rng(seed)
    tables = make_tables()
    tables.initial[:, 1:] = 1.0
    made = [conditions(rng) for _ in range(REQUESTS)]
    for slot, each in enumerate(made):
        write(tables, slot, each)
    history = [np.zeros((0, COLUMNS + 1), dtype=np.float32)] * REQUESTS
    for chosen, counts, layout in steps(rng):
        tokens = int(layout.position.shape[0])
        step_records.begin_records(tables, layout, CONDITIONS)
        first = [int(layout.position[int(begin)]) for begin in layout.start[:-1]]
        for slot, position in zip(chosen, first, strict=True):
            history[slot] = history[slot][:position]
        committed = step_records.committed_state(tables, layout)
        for r, slot in enumerate(chosen):
            expected = [state_of(each, history[slot]) for each in made[slot]]
            np.testing.assert_allclose(committed[r], expected, rtol=1e-6)
        tables.record[:tokens, 1:5] = torch.from_numpy(rng.normal(size=(tokens, 4)).astype("f4"))
        step_records.fold_records(tables, layout, CONDITIONS)
        for slot, begin, count in zip(chosen, layout.start.tolist(), counts, strict=False):
            rows = tables.record[begin : begin + count].numpy().copy()
            rows = np.concatenate([rows, layout.token[begin : begin + count, None]], axis=1)
            history[slot] = np.concatenate([history[slot], rows])
            for offset in range(max(0, count - DRAFTS - 1), count):
                upto = history[slot][: len(history[slot]) - count + offset + 1]
                numbers = [
                    each.number for each in made[slot]
                    if each.kind == kinds.STOP and len(upto) > each.first and state_of(each, upto) >= each.count
                    and (not each.mask or upto[-1, each.mask])
                ]  # fmt: skip
                assert rows[offset, 0] == min(numbers, default=0)


@pytest.mark.parametrize("seed", range(6))
def test_part_equals_a_loop_over_accepted_tokens(seed: int) -> None:
    """Catches a part that begins or ends one token late, and markers of rejected drafts or of other requests.

    A break that does not end the part, or that still belongs to it, is caught as well.
    """
    rng = np.random.default_rng(seed)
    tables = make_tables()
    tables.initial[:, 1:] = 1.0
    made = [part(rng) for _ in range(REQUESTS)]
    for slot, each in enumerate(made):
        write(tables, slot, [each])
    tokens: list[list[int]] = [[] for _ in range(REQUESTS)]
    seen = set()
    for chosen, counts, layout in steps(rng):
        step_records.begin_records(tables, layout, CONDITIONS)
        step_records.fold_records(tables, layout, CONDITIONS)
        for slot, begin, count in zip(chosen, layout.start.tolist(), counts, strict=False):
            each = made[slot]
            del tokens[slot][int(layout.position[begin]) :]
            for index in range(begin, begin + count):
                inside = each.opened
                for token in tokens[slot][each.first :]:
                    inside = (inside or token == each.score) and token not in (each.count, *each.breaks)
                tokens[slot].append(int(layout.token[index]))
                inside = tokens[slot][-1] == each.score or (inside and tokens[slot][-1] not in each.breaks)
                expected = float(inside != bool(each.number)) if layout.position[index] >= each.start else 1.0
                assert tables.record[index, PART_COLUMN] == expected
                seen.add(expected)
    assert seen == {0.0, 1.0}


def factor_of(each: DeviceCondition, before: np.ndarray, position: int) -> float:
    """Return the factor at a position from the scores of the positions ahead of it, or of a part of them."""
    state = state_of(each, before)
    if each.kind == kinds.LATCH:
        return state
    if each.kind == kinds.HELD:
        return float(state >= each.count)
    if each.mask and not np.isfinite(state):
        return 0.0
    if each.kind in (kinds.PROMPT_MEAN, kinds.MEAN):
        state /= max(1, each.count if each.kind == kinds.PROMPT_MEAN else position - each.first)
    distance = each.sign * (state - each.threshold)
    return 1 / (1 + np.exp(-each.sharpness * distance)) if each.sharpness else float(distance > 0)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_with_another_factor_are_found(seed: int) -> None:
    """Catches a draft that keeps the factor of the token before it, and drafts that are dropped without need."""
    rng = np.random.default_rng(seed)
    tables = make_tables()
    made = [conditions(rng)[: rng.integers(1, 4)] for _ in range(REQUESTS)]
    for slot, each in enumerate(made):
        write(tables, slot, each)
    history = [np.zeros((0, COLUMNS), dtype=np.float32)] * REQUESTS
    seen = set()
    for chosen, counts, layout in steps(rng):
        tokens = int(layout.position.shape[0])
        before = step_records.committed_state(tables, layout)
        tables.record[:tokens, 1:5] = torch.from_numpy(rng.normal(size=(tokens, 4)).astype("f4"))
        tables.record[:tokens, PART_COLUMN] = torch.from_numpy(rng.integers(0, 2, tokens).astype("f4"))
        step_records.fold_records(tables, layout, CONDITIONS)
        wrong = step_records.wrong_drafts(tables, layout, before, CONDITIONS)
        for r, (slot, count) in enumerate(zip(chosen, counts, strict=True)):
            begin = int(layout.start[r])
            first = int(layout.position[begin])
            committed = history[slot][:first]
            history[slot] = np.concatenate([committed, tables.record[begin : begin + count].numpy().copy()])
            for dropped in range(min(DRAFTS, count)):
                position = first + count - 1 - dropped
                expected = any(
                    factor_of(each, committed, position) != factor_of(each, history[slot][:position], position)
                    for each in made[slot]
                    if each.kind not in (kinds.PART, kinds.STOP) and position >= each.start
                )
                assert bool(wrong[r, dropped]) == expected
                seen.add(expected)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("wrong", "drafts", "kept"),
    [
        ([False, False, False], 3, 4),
        ([True, False, False], 3, 3),
        ([True, False, True], 3, 1),
        ([False, True, True], 1, 2),
        ([True, True, True], 0, 1),
    ],
)
def test_tokens_before_the_first_wrong_draft_are_kept(wrong: list[bool], drafts: int, kept: int) -> None:
    """Catches a wrong draft that is accepted, and one token too few; tokens that are not drafts always count."""
    assert step_records.accepted_tokens(torch.tensor([wrong]), torch.tensor([drafts])).tolist() == [kept]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_kernels_equal_the_definition(seed: int) -> None:
    """Catches a kernel that differs from the definition in a record or a state."""
    from vllm_steer.taps import records_kernel

    rng = np.random.default_rng(seed)
    slow, fast = make_tables(), make_tables("cuda")
    for slot in range(REQUESTS):
        made = conditions(rng)
        write(slow, slot, made)
        write(fast, slot, made)
    initial = torch.from_numpy(rng.normal(size=slow.initial.shape).astype("f4"))
    initial[:, 0] = 0.0
    for tables in (slow, fast):
        tables.initial.copy_(initial)
    for _, _, layout in steps(rng):
        tokens = int(layout.position.shape[0])
        scores = torch.from_numpy(rng.normal(size=(tokens, 4)).astype("f4"))
        replayed = torch.from_numpy(rng.integers(0, 8, tokens) == 0).int()
        on_gpu = BatchLayout(*(each.cuda() for each in vars(layout).values()))
        begun = []
        for tables, place, begin, fold in (
            (slow, layout, step_records.begin_records, step_records.fold_records),
            (fast, on_gpu, records_kernel.launch_begin, records_kernel.launch_fold),
        ):
            tables.replayed[:tokens].copy_(replayed)
            begin(tables, place, CONDITIONS)
            begun.append(tables.record[:tokens].cpu().clone())
            tables.record[:tokens, 1:5].copy_(scores)
            fold(tables, place, CONDITIONS)
        torch.testing.assert_close(begun[1], begun[0], atol=1e-5, rtol=1e-5, equal_nan=True)
        torch.testing.assert_close(
            fast.record[:tokens].cpu(), slow.record[:tokens], atol=1e-5, rtol=1e-5, equal_nan=True
        )
        torch.testing.assert_close(fast.carry.cpu(), slow.carry, atol=1e-6, rtol=1e-6, equal_nan=True)
        torch.testing.assert_close(fast.next_position.cpu(), slow.next_position)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hidden", [48, 4096])
def test_read_and_gate_kernels_equal_the_definition(hidden: int, fused: bool) -> None:
    """Catches a read, gate or scaled edit of the tap kernel that differs, also between two fused sites."""
    from vllm_steer.taps.tap_kernel import launch_tap

    rng = np.random.default_rng(hidden)
    results = []
    config = SteeringConfig(record_columns=COLUMNS - 1, capture_rows=8)
    x = torch.from_numpy(rng.normal(size=(TOKENS, hidden)).astype("f4"))
    vectors = torch.from_numpy((rng.normal(size=(4, hidden)) / hidden**0.5).astype("f4"))
    replayed = torch.from_numpy(rng.integers(0, 6, TOKENS) == 0).int()
    record = torch.from_numpy(rng.random((TOKENS, COLUMNS)).astype("f4"))
    instructions = [
        (ops.ADD, 0, 2, 5), (ops.READ, 1, 3, 2), (ops.READ, 2, 4, 3), (ops.GATE, 0, 5, 2 | 6 << 16),
        (ops.GATE, 0, 0, 3 | 7 << 16), (ops.ABLATE, 3, 7, 6), (ops.ADD, 0, 0, 7 | 6 << 16),
    ]  # fmt: skip
    parameters = [
        (2.0, 0, 0, 0), (0.3, 2, 0, 0), (-0.1, 3, 0, 0), (0.2, 1.0, 0.0, 0), (0.45, -1.0, 5.0, 0), (1.0, 0, 0, 0),
        (3.0, 0, 0, 0),
    ]  # fmt: skip
    for device in ("cpu", "cuda"):
        tables = Tables(
            config, num_sites=3, hidden_size=hidden, max_tokens=TOKENS, max_requests=2, dtype=torch.float32,
            device=torch.device(device),
        )  # fmt: skip
        tables.num_recorded = 1
        tables.vector[:4] = vectors
        tables.instruction[1:8] = torch.tensor(instructions, dtype=torch.int32)
        tables.parameter[1:8] = torch.tensor(parameters)
        tables.token_row[:] = torch.arange(TOKENS) % 2
        tables.replayed.copy_(replayed)
        tables.record.copy_(record)
        tables.head[0] = 1
        tables.head[1, :2] = torch.tensor([1, 6], dtype=torch.int32)
        target = x.clone().to(device)
        first, second = tables.head_column(0), tables.head_column(1)
        if device == "cpu":
            apply_tap(target, None, first, tables)
            apply_tap(target, None, second, tables)
        elif fused:
            launch_tap(target, None, first, tables, second)
        else:
            launch_tap(target, None, first, tables)
            launch_tap(target, None, second, tables)
        results.append((target.cpu(), tables.record.cpu()))
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-4, rtol=1e-4)

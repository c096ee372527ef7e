# SPDX-License-Identifier: Apache-2.0
"""The definitions in plain torch against the documented formulas, computed per token in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.taps import two_summands
from tests.taps.infinite import wrong_rows
from tests.taps.random_tables import random_tables
from vllm_steer.program import instructions as ops
from vllm_steer.taps.reference import apply_tap
from vllm_steer.taps.tables import Tables


def run_token(
    x: np.ndarray, token: int, site: int, tables: Tables, stored: dict[int, np.ndarray] | None = None, base: int = 0
) -> np.ndarray:
    """Return one token's stream after its instructions by the formulas; captured rows go to ``stored``."""
    row = int(tables.token_row[token])
    place = int(tables.head_column(site)[row]) if row else 0
    activation = 0.0
    while place:
        code, vector, following, _ = tables.instruction[place].tolist()
        strength, low, high, first = tables.parameter[place].tolist()
        operand = tables.operand[int(first) + int(tables.token_offset[token])]
        v = tables.vector[0 if code == ops.CAPTURE else vector].double().numpy()
        along = float(x @ v)
        if code == ops.ADD:
            x = x + strength * v
        elif code == ops.ADD_NORMED:
            x = x + strength * np.linalg.norm(x) * v
        elif code == ops.ABLATE:
            x = x - strength * along * v
        elif code == ops.CLAMP:
            x = x + strength * (min(max(along, low), high) - along) * v
        elif code == ops.REPLACE:
            x = x + strength * (v - x)
        elif code == ops.REPLACE_AT:
            if operand != -1:
                x = x + strength * (tables.vector[operand].double().numpy() - x)
        elif code == ops.SET_AT:
            if operand != -1:
                x = x + strength * (float(operand.view(torch.float32)) - along) * v
        elif code == ops.MEASURE:
            activation = along + low if along + low > high else 0.0
        elif code == ops.FEATURE:
            x = x + strength * (low - activation) * v
        elif code == ops.CAPTURE:
            if stored is not None:
                stored[base + vector] = x
        else:
            raise ValueError(code)
        place = following
    return x


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("with_other", [False, True])
def test_runs_each_tokens_instructions_in_order(seed: int, with_other: bool) -> None:
    """Catches a wrong formula or order, the row of another token, and a single summand used as the stream."""
    tables = random_tables(seed, 64, torch.device("cpu"))
    torch.manual_seed(seed)
    for site in range(tables.num_sites):
        target = torch.randn(24, 64)
        other = torch.randn(24, 64) if with_other else torch.zeros(24, 64)
        expected = [run_token((target[t] + other[t]).double().numpy(), t, site, tables) for t in range(24)]
        apply_tap(target, other if with_other else None, tables.head_column(site), tables)
        np.testing.assert_allclose((target + other).numpy(), np.stack(expected), atol=2e-5)


def test_the_model_goes_on_with_what_is_reported() -> None:
    """Catches an edit that the model's addition of the summands rounds away, and values from before that rounding."""
    assert two_summands.wrong_rows(apply_tap, torch.bfloat16, torch.device("cpu")) == ""


def test_an_edit_of_one_summand_is_rounded_away() -> None:
    """Negative control: with the change in one summand, replaced rows and readouts differ from the stream."""

    def one_summand(target: torch.Tensor, other: torch.Tensor, head: torch.Tensor, tables: Tables) -> None:
        branch = other.clone()
        apply_tap(target, other, head, tables)
        stream = target.float() + other.float()
        target.copy_(stream - branch.float())
        other.copy_(branch)

    problems = two_summands.wrong_rows(one_summand, torch.bfloat16, torch.device("cpu"))
    assert "elements of the replaced row differ" in problems and "the readout of token 1 is off" in problems


def test_capture_stores_the_stream_before_and_after_edits() -> None:
    """Catches the wrong summand, a value from before the edits, and rows stored at another token's offset."""
    tables = random_tables(3, 64, torch.device("cpu"))
    counts = [int(tables.row_captures[row]) for row in tables.token_row.tolist()]
    bases = np.cumsum([0, *counts])
    assert tables.token_base.tolist() == bases[:-1].tolist()
    for site in range(tables.num_sites):
        target, other = torch.randn(24, 64), torch.randn(24, 64)
        stored: dict[int, np.ndarray] = {}
        for t in range(24):
            stream = (target[t] + other[t]).double().numpy()
            run_token(stream, t, site, tables, stored, int(bases[t]))
        tables.arena.fill_(0.5)
        apply_tap(target, other, tables.head_column(site), tables)
        for place in range(tables.arena.shape[0]):
            expected = stored.get(place, np.full(64, 0.5))
            np.testing.assert_allclose(tables.arena[place].numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("with_other", [False, True])
def test_reads_leave_infinite_values_unchanged(with_other: bool) -> None:
    """Catches a token that is only captured, read or not covered, and yet is written, and a cosine of 0 of a NaN."""
    assert wrong_rows(apply_tap, with_other, torch.device("cpu")) == ""

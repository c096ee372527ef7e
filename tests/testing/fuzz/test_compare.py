# SPDX-License-Identifier: Apache-2.0
"""Comparison of answers, ties, and the JSON form of workloads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer.testing.fuzz.answers import Answer, Sample
from vllm_steer.testing.fuzz.compare import Counts, Tolerance, compare
from vllm_steer.testing.fuzz.draw import MAX_MODEL_LEN, draw_requests, draw_settings
from vllm_steer.testing.fuzz.workload import ModelFacts, Request, Workload, sampling_params

REQUEST = Request(name="r", prompt=[1, 2, 3], max_tokens=3, capture={"hooks": {"post_block": [0]}, "positions": "all"})
FACTS = ModelFacts(hidden=8, layers=4, vocab=50, scale=(5.0,) * 24)
ROWS = torch.arange(40, dtype=torch.float32).reshape(5, 8)


def answer(tokens: tuple[int, ...] = (7, 8, 9), second: float = -3.0, rows: Any = ROWS, **changes: Any) -> Answer:
    """Return an answer with likeliest tokens 7, 8, 9; token 6 is always second, by ``second``."""
    top = tuple({7 + i: -0.1, 6: -0.1 + second} for i in range(3))
    positions = tuple(range(len(rows)))
    fields: dict[str, Any] = {"finish_reason": "length", "status": "ok", "rows": {("post_block", 0): (positions, rows)}}
    return Answer((Sample(tokens=tokens, top=top, **{**fields, **changes}),))


def verdict(got: Answer, right: Answer | None = None, request: Request = REQUEST) -> tuple[str | None, Counts]:
    counts = Counts()
    return compare(request, got, right or answer(), Tolerance.of("float32"), counts), counts


def test_equal_answers_pass_and_are_counted() -> None:
    problem, counts = verdict(answer())
    assert problem is None
    assert (counts.requests, counts.tokens, counts.rows, counts.ties) == (1, 3, 5, 0)


def test_different_token_fails_unless_the_reference_has_a_tie() -> None:
    """Catches wrong tokens accepted as ties, and ties reported as wrong tokens."""
    assert "token 1 is 6, expected 8" in str(verdict(answer((7, 6, 9)))[0])
    assert "not among the likeliest" in str(verdict(answer((7, 40, 9)), answer(second=-1e-4))[0])
    changed = ROWS.clone()
    changed[4] += 1  # position 4 follows the tie, so it is not compared
    problem, counts = verdict(answer((7, 6, 9), rows=changed), answer(second=-1e-4))
    assert problem is None
    assert (counts.ties, counts.tokens, counts.rows) == (1, 1, 4)
    changed[3] += 1  # position 3 holds token 7, before the tie
    assert "position 3" in str(verdict(answer((7, 6, 9), rows=changed), answer(second=-1e-4))[0])


def test_different_logprob_of_the_same_token_fails() -> None:
    """Catches a lost edit that does not change any token, and NaN that is taken for equal or for a tie."""
    off = answer()
    off.samples[0].top[1][8] = -0.2  # type: ignore[index]
    assert "log-probability" in str(verdict(off)[0])
    off.samples[0].top[1][8] = float("nan")  # type: ignore[index]
    assert "log-probability nan" in str(verdict(off)[0])
    assert "expected nan" in str(verdict(answer(), off)[0])
    assert "token 1 is 6, expected 8" in str(verdict(answer((7, 6, 9)), off)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ROWS[:4]}, "positions"),
        ({"rows": ROWS + 1}, "of its norm"),
        ({"rows": ROWS * float("nan")}, "nan of its norm"),
        ({"status": "partial", "error": "lost"}, "partial (lost)"),
        ({"finish_reason": "stop"}, "(stop)"),
        ({"tokens": (7, 8)}, "2 tokens"),
    ],
)
def test_different_rows_status_or_finish_reason_fail(changes: dict[str, Any], message: str) -> None:
    """Catches a comparison of tokens only."""
    assert message in str(verdict(answer(**changes))[0])


def test_few_rows_in_bfloat16_may_be_outliers() -> None:
    """Catches a limit that the rounding of single rows exceeds, and one that accepts wrong rows."""
    right = torch.ones(40, 8)
    request = Request(name="r", prompt=list(range(38)), max_tokens=3, capture=REQUEST.capture)

    def problem(rows: list[int], distance: float, dtype: str = "bfloat16") -> str:
        got = right.clone()
        got[rows] *= 1 + distance
        given = answer(rows=got), answer(rows=right)
        return str(compare(request, *given, Tolerance.of(dtype), Counts()))

    assert problem(list(range(40)), 0.07) == problem([3], 0.19) == problem([3, 9], 0.19) == "None"
    assert "(3 such rows)" in problem([3, 9, 30], 0.19)
    assert "(1 such rows)" in problem([3], 0.3)
    assert "(1 such rows)" in problem([3], float("nan"))
    assert "(1 such rows)" in problem([3], 3e-3, "float32")


def test_refusal_passes_only_if_the_tables_are_too_small() -> None:
    assert verdict(Answer(refused="needs 5 table rows; the engine allows 4"))[0] is None
    assert verdict(Answer(refused="needs more than 4 token segments, the engine's max_segments"))[0] is None
    assert "refused" in str(verdict(Answer(refused="layer 4 does not exist"))[0])


def test_workload_round_trips_and_its_requests_are_valid() -> None:
    """Catches a replay that differs from the finding, and drawn requests that every engine refuses."""
    rng = np.random.default_rng(5)
    for _ in range(5):
        workload = Workload(settings=draw_settings(rng, FACTS), requests=draw_requests(rng, 40, FACTS))
        assert Workload.from_json(workload.to_json()) == workload
        for request in workload.requests:
            run_each_alone = request.keep + 125 if request.grows else 0
            assert run_each_alone + len(request.prompt) + request.max_tokens <= MAX_MODEL_LEN
            assert sampling_params(request, FACTS.hidden).n == request.n
    assert draw_requests(np.random.default_rng(1), 9, FACTS) == draw_requests(np.random.default_rng(1), 9, FACTS)

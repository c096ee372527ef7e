# SPDX-License-Identifier: Apache-2.0
"""What runs of two engines are read as."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cost import compare, first_token


class Timed:
    """An engine that takes as long as it is told: to the first token, and for each."""

    def __init__(self, first: float, each: float, asked: list[Any]) -> None:
        self._first, self._each, self._asked = first, each, asked

    def run(self, variant: str, batch: int, prompt: int, generated: int) -> float:
        self._asked.append(self)
        return self._first + self._each * generated


def test_each_pair_of_engines_takes_turns_and_counts() -> None:
    """Catches a stock engine compared with another pair's, a pair that is left out, and a warm-up that counts."""
    asked: list[Any] = []
    stock = [Timed(1.0, 0.1, asked), Timed(1.0, 0.2, asked), Timed(1.0, 0.4, asked)]
    steered: Any = [Timed(1.0, 0.1 * 1.0, asked), Timed(1.0, 0.2 * 1.1, asked), Timed(1.0, 0.4 * 1.5, asked)]
    found = compare(stock, steered, "idle", 8, 16, 64, 2)  # type: ignore[arg-type]
    assert (found["per token"], *found["spread"]) == pytest.approx((1.1, 1.0, 1.5))
    assert found["engines"] == 3
    assert [len(runs) for runs in found["raw"].values()] == [6, 6]
    # Three lengths each, by turns, and the other way about each time.
    turns = [steered[0], stock[0], stock[0], steered[0], steered[0], stock[0]]
    assert asked[: 3 * len(turns)] == [engine for engine in turns for _ in range(3)]


def test_first_tokens_are_compared_over_both_orders() -> None:
    """Catches the engine that has waited, by turns the one and the other, taken for the slower one."""
    waited, ran = 1.3, 1.0
    raw = {
        "stock": [[ran], [waited], [ran], [waited]],
        "steered": [[waited], [ran], [waited], [ran]],
    }
    assert first_token(raw) == pytest.approx(1.0)
    assert first_token({"stock": [[ran]], "steered": [[waited]]}) == pytest.approx(1.3)


def test_first_tokens_of_one_pair_are_not_put_beside_another_pairs() -> None:
    """Catches the last run of a pair taken together with the first one of the next, run in the same order."""
    raw = {"stock": [[1.0], [1.0], [1.0]] * 2, "steered": [[1.0], [1.0], [1.0], [4.0], [4.0], [4.0]]}
    assert first_token(raw, 2) == pytest.approx(2.5)
    assert first_token(raw) == pytest.approx(2.0)

# SPDX-License-Identifier: Apache-2.0
"""Tests of the comparison of two engines in ``benchmarks/cost.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost
from benchmarks.cost import compare, first_token, per_token
from benchmarks.groups import GROUPS, PREFILL, BenchmarkGroup
from benchmarks.shapes import SHAPES
from benchmarks.variants import variants


class TimedEngine:
    """Engine with given times to the first token and per token."""

    def __init__(self, first: float, each: float, asked: list[Any]) -> None:
        self._first, self._each, self._asked = first, each, asked

    def run(self, variant: str, batch: int, prompt: int, generated: int, times: int = 1) -> float:
        self._asked.append(self)
        return self._first + self._each * generated


def test_pairs_of_engines_alternate() -> None:
    """Catches a stock engine compared with another pair, an ignored pair, and a counted warm-up."""
    asked: list[Any] = []
    stock = [TimedEngine(1.0, 0.1, asked), TimedEngine(1.0, 0.2, asked), TimedEngine(1.0, 0.4, asked)]
    steered: Any = [
        TimedEngine(1.0, 0.1 * 1.0, asked),
        TimedEngine(1.0, 0.2 * 1.1, asked),
        TimedEngine(1.0, 0.4 * 1.5, asked),
    ]
    found = compare(stock, steered, "idle", 8, 16, 64, 2)  # type: ignore[arg-type]
    assert (found["per token"], *found["spread"]) == pytest.approx((1.1, 1.0, 1.5))
    assert found["engines"] == 3
    assert [len(runs) for runs in found["raw"].values()] == [6, 6]
    assert found["by pair"] == pytest.approx([1.0, 1.1, 1.5])
    # Three lengths each and one run ahead, by turns, and the other way about each time.
    turns = [steered[0], stock[0], stock[0], steered[0], steered[0], stock[0]]
    assert asked[: 4 * len(turns)] == [engine for engine in turns for _ in range(4)]


def test_the_fastest_repetitions_count() -> None:
    """Catches a median, which slow repetitions of one engine change, and engines of several pairs mixed up."""
    quick, slow = [1.0, 2.0, 5.0], [1.5, 2.0, 8.0]
    assert per_token({"stock": [quick] * 3, "steered": [slow, slow, quick]}, [1, 8, 32]) == pytest.approx(1.0)
    twice = [[2 * each for each in quick]] * 2
    raw = {"stock": [quick, slow, *twice], "steered": [slow, quick, *twice]}
    assert per_token(raw, [1, 8, 32], 2) == pytest.approx(1.0)


class WaitingEngine(TimedEngine):
    """Engine whose first run after another engine is slower."""

    def run(self, variant: str, batch: int, prompt: int, generated: int, times: int = 1) -> float:
        waited = not self._asked or self._asked[-1] is not self
        return super().run(variant, batch, prompt, generated, times) + 0.3 * waited


def test_runs_after_waiting_are_not_counted() -> None:
    """Catches times to the first token of an engine that has just waited for the other one."""
    asked: list[Any] = []
    one, other = WaitingEngine(1.0, 0.1, asked), WaitingEngine(1.0, 0.1, asked)
    found = compare([one], [other], "idle", 8, 16, 64, 3)  # type: ignore[list-item]
    assert {seconds[0] for runs in found["raw"].values() for seconds in runs} == {1.1}


class CountingEngine(TimedEngine):
    """Engine that records how many runs are averaged."""

    def run(self, variant: str, batch: int, prompt: int, generated: int, times: int = 1) -> float:
        self._asked.append((generated, times))
        return float(generated)


def test_first_token_times_average_several_runs() -> None:
    """Catches first-token times of single runs, and repeated long runs."""
    asked: list[Any] = []
    one, other = CountingEngine(1.0, 0.1, asked), CountingEngine(1.0, 0.1, asked)
    compare([one], [other], "idle", 8, 16, 256, 1)  # type: ignore[list-item]
    assert set(asked) == {(1, 1), (1, cost.FIRST_TOKENS), (64, 1), (256, 1)}


def test_first_token_ratio_uses_both_orders() -> None:
    """Catches a waiting effect, which alternates between the engines, counted as a difference of speed."""
    waited, ran = 1.3, 1.0
    raw = {
        "stock": [[ran], [waited], [ran], [waited]],
        "steered": [[waited], [ran], [waited], [ran]],
    }
    assert first_token(raw) == pytest.approx(1.0)
    assert first_token({"stock": [[ran]], "steered": [[waited]]}) == pytest.approx(1.3)


def test_first_token_ratio_does_not_mix_pairs() -> None:
    """Catches the last run of a pair combined with the first run of the next pair."""
    raw = {"stock": [[1.0], [1.0], [1.0]] * 2, "steered": [[1.0], [1.0], [1.0], [4.0], [4.0], [4.0]]}
    assert first_token(raw, 2) == pytest.approx(2.5)
    assert first_token(raw) == pytest.approx(2.0)


class FakeEngine:
    """Engine without a model that records its calls."""

    made: list[FakeEngine]

    def __init__(self, who: str, model: str, settings: dict[str, Any]) -> None:
        self.who, self.shape, self.settings = who, Path(model).name, settings
        self.waited, self.closed, self.ran = False, False, []
        self.made.append(self)

    def wait(self) -> None:
        self.waited = True

    def run(self, variant: str, batch: int, prompt: int, generated: int, times: int = 1) -> float:
        assert all(engine.waited for engine in self.made)
        self.ran.append((variant, batch, prompt))
        return 1.0 + (0.2 if self.who == "steered" else 0.1) * generated

    def close(self) -> None:
        self.closed = True


def run_cost(patch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the script with fake engines and return the written files by shape."""
    FakeEngine.made = []
    patch.setattr(cost, "Engine", FakeEngine)
    patch.setattr(cost, "environment", lambda: {"gpu": "none"})
    patch.setattr(sys, "argv", ["cost", "--out", str(folder / "{shape}.json"), *arguments])
    cost.main()
    assert all(engine.closed for engine in FakeEngine.made)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_groups_of_a_shape_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a group that overwrites another group's cells or uses its engines."""
    small = BenchmarkGroup("llama-8b", 1, ("idle@1,prefill", "one site@8"), pairs=2, repeats=2)
    large = BenchmarkGroup("llama-8b", 9, ("idle@128", "stock again@128"), repeats=2, generated=64)
    other = BenchmarkGroup("qwen3-0.6b", 2, ("idle@1",), repeats=2)
    monkeypatch.setattr(cost, "GROUPS", {"small": small, "large": large, "other": other})
    files = run_cost(monkeypatch, tmp_path, "--groups", "small", "large", "other")
    assert set(files) == {"llama-8b", "qwen3-0.6b"}
    cells = files["llama-8b"]["variants"]
    assert {name: list(found) for name, found in cells.items()} == {
        "idle": ["1", "prefill 8192", "128"], "one site": ["8"], "stock again": ["128"],
    }  # fmt: skip
    assert (cells["idle"]["1"]["engines"], cells["idle"]["128"]["engines"]) == (2, 1)
    assert cells["idle"]["1"]["per token"] == pytest.approx(2)
    assert cells["stock again"]["128"]["per token"] == pytest.approx(1)
    by_cache: dict[int, list[FakeEngine]] = {}
    for engine in FakeEngine.made:
        by_cache.setdefault(engine.settings["kv_cache_memory_bytes"] >> 30, []).append(engine)
    assert {gib: {batch for each in of for _, batch, _ in each.ran} for gib, of in by_cache.items()} == {
        1: {1, 8}, 9: {128}, 2: {1},
    }  # fmt: skip
    assert [engine.who for engine in by_cache[9]] == ["stock", "steered", "control"]
    assert {shape: file["groups"] for shape, file in files.items()} == {
        "llama-8b": ["small", "large"], "qwen3-0.6b": ["other"],
    }  # fmt: skip


def test_groups_with_equal_settings_share_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches engines that start twice, and a group without its second stock engine."""
    monkeypatch.setattr(cost, "GROUPS", {
        "batches": BenchmarkGroup("llama-8b", 9, ("idle@128",), repeats=2, generated=64),
        "queues": BenchmarkGroup("llama-8b", 9, ("idle@1000", "stock again@1000"), repeats=3),
        "two GPUs": BenchmarkGroup("llama-8b", 9, ("idle@8",), repeats=1, tensor_parallel=2),
    })  # fmt: skip
    run_cost(monkeypatch, tmp_path, "--groups", "batches", "queues", "two GPUs")
    assert [(engine.who, engine.settings["tensor_parallel_size"]) for engine in FakeEngine.made] == [
        ("stock", 1), ("steered", 1), ("control", 1), ("stock", 2), ("steered", 2),
    ]  # fmt: skip
    assert [{batch for _, batch, _ in engine.ran} for engine in FakeEngine.made] == [
        {128, 1000},
        {128, 1000},
        {1000},
        {8},
        {8},
    ]


@pytest.mark.parametrize("name", list(GROUPS))
def test_groups_are_valid(name: str) -> None:
    """Catches an unknown shape, variant or batch, which would only fail after all engines have started."""
    group = GROUPS[name]
    assert group.shape in SHAPES
    for cell in group.cells:
        variant, _, batches = cell.partition("@")
        assert variant in {*variants(2, 8), cost.CONTROL}
        assert all(batch == PREFILL or int(batch) > 0 for batch in batches.split(","))

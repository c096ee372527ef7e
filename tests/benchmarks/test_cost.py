# SPDX-License-Identifier: Apache-2.0
"""What runs of two engines are read as."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost
from benchmarks.cost import compare, first_token
from benchmarks.lots import LOTS, PREFILL, Lot
from benchmarks.shapes import SHAPES
from benchmarks.variants import variants


class Timed:
    """An engine that takes as long as it is told: to the first token, and for each."""

    def __init__(self, first: float, each: float, asked: list[Any]) -> None:
        self._first, self._each, self._asked = first, each, asked

    def run(self, variant: str, batch: int, prompt: int, generated: int, times: int = 1) -> float:
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
    assert found["by pair"] == pytest.approx([1.0, 1.1, 1.5])
    # Three lengths each and one run ahead, by turns, and the other way about each time.
    turns = [steered[0], stock[0], stock[0], steered[0], steered[0], stock[0]]
    assert asked[: 4 * len(turns)] == [engine for engine in turns for _ in range(4)]


class Waited(Timed):
    """Slower in its first run after the other one's."""

    def run(self, variant: str, batch: int, prompt: int, generated: int, times: int = 1) -> float:
        waited = not self._asked or self._asked[-1] is not self
        return super().run(variant, batch, prompt, generated, times) + 0.3 * waited


def test_a_run_after_waiting_does_not_count() -> None:
    """Catches first tokens that are those of an engine which has gone cold while the other one ran."""
    asked: list[Any] = []
    one, other = Waited(1.0, 0.1, asked), Waited(1.0, 0.1, asked)
    found = compare([one], [other], "idle", 8, 16, 64, 3)  # type: ignore[list-item]
    assert {seconds[0] for runs in found["raw"].values() for seconds in runs} == {1.1}


class Counted(Timed):
    """Notes how many runs each figure is of."""

    def run(self, variant: str, batch: int, prompt: int, generated: int, times: int = 1) -> float:
        self._asked.append((generated, times))
        return float(generated)


def test_a_first_token_is_that_of_several_runs() -> None:
    """Catches first tokens of single runs, which are up to a third apart, and long runs that are made several times."""
    asked: list[Any] = []
    one, other = Counted(1.0, 0.1, asked), Counted(1.0, 0.1, asked)
    compare([one], [other], "idle", 8, 16, 256, 1)  # type: ignore[list-item]
    assert set(asked) == {(1, 1), (1, cost.FIRST_TOKENS), (64, 1), (256, 1)}


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


class Noted:
    """An engine of no model, that is waited for and closed."""

    made: list[Noted]

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


def measured(patch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, Any]:
    """The file that a run with engines of no model writes for each shape, by its name."""
    Noted.made = []
    patch.setattr(cost, "Engine", Noted)
    patch.setattr(cost, "environment", lambda: {"gpu": "none"})
    patch.setattr(sys, "argv", ["cost", "--out", str(folder / "{shape}.json"), *arguments])
    cost.main()
    assert all(engine.closed for engine in Noted.made)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_lots_of_a_shape_are_measured_with_their_own_engines_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a second lot that overwrites the first one's cells, or is measured with the first one's engines."""
    small = Lot("llama-8b", 1, ("idle@1,prefill", "one site@8"), pairs=2, repeats=2)
    large = Lot("llama-8b", 9, ("idle@128", "stock again@128"), repeats=2, generated=64)
    other = Lot("qwen3-0.6b", 2, ("idle@1",), repeats=2)
    monkeypatch.setattr(cost, "LOTS", {"small": small, "large": large, "other": other})
    files = measured(monkeypatch, tmp_path, "--lots", "small", "large", "other")
    assert set(files) == {"llama-8b", "qwen3-0.6b"}
    cells = files["llama-8b"]["variants"]
    assert {name: list(found) for name, found in cells.items()} == {
        "idle": ["1", "prefill 8192", "128"], "one site": ["8"], "stock again": ["128"],
    }  # fmt: skip
    assert (cells["idle"]["1"]["engines"], cells["idle"]["128"]["engines"]) == (2, 1)
    assert cells["idle"]["1"]["per token"] == pytest.approx(2)
    assert cells["stock again"]["128"]["per token"] == pytest.approx(1)
    by_lot: dict[int, list[Noted]] = {}
    for engine in Noted.made:
        by_lot.setdefault(engine.settings["kv_cache_memory_bytes"] >> 30, []).append(engine)
    assert {gib: {batch for each in of for _, batch, _ in each.ran} for gib, of in by_lot.items()} == {
        1: {1, 8}, 9: {128}, 2: {1},
    }  # fmt: skip
    assert [engine.who for engine in by_lot[9]] == ["stock", "steered", "control"]
    assert {shape: file["lots"] for shape, file in files.items()} == {
        "llama-8b": ["small", "large"], "qwen3-0.6b": ["other"],
    }  # fmt: skip


def test_lots_with_the_same_engines_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches engines that are started twice, and a lot without the second stock engine."""
    monkeypatch.setattr(cost, "LOTS", {
        "batches": Lot("llama-8b", 9, ("idle@128",), repeats=2, generated=64),
        "queues": Lot("llama-8b", 9, ("idle@1000", "stock again@1000"), repeats=3),
        "two GPUs": Lot("llama-8b", 9, ("idle@8",), repeats=1, tensor_parallel=2),
    })  # fmt: skip
    measured(monkeypatch, tmp_path, "--lots", "batches", "queues", "two GPUs")
    assert [(engine.who, engine.settings["tensor_parallel_size"]) for engine in Noted.made] == [
        ("stock", 1), ("steered", 1), ("control", 1), ("stock", 2), ("steered", 2),
    ]  # fmt: skip
    assert [{batch for _, batch, _ in engine.ran} for engine in Noted.made] == [
        {128, 1000},
        {128, 1000},
        {1000},
        {8},
        {8},
    ]


def test_without_lots_each_variant_is_measured_at_the_batches_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a variant that is left out, prefill of one that has none, and all rows of all layers at batch 256."""
    found = measured(monkeypatch, tmp_path, "--batches", "1", "256", "--repeats", "1")["llama-8b"]["variants"]
    assert list(found) == list(variants(2, 8))
    assert {name for name, cells in found.items() if "prefill 8192" in cells} == {"idle", "one site"}
    assert list(found["capture all layers, all tokens"]) == ["1"]
    some = measured(monkeypatch, tmp_path, "--only", "one site@8,prefill", "idle", "--batches", "1", "--repeats", "1")
    assert {name: list(cells) for name, cells in some["llama-8b"]["variants"].items()} == {
        "one site": ["8", "prefill 8192"], "idle": ["1", "prefill 8192"],
    }  # fmt: skip


def test_nothing_is_measured_before_the_file_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches runs beside what they are to come after; engines start meanwhile."""
    gate = tmp_path / "gate"
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        assert Noted.made[0].waited and not any(engine.ran for engine in Noted.made)
        slept.append(seconds)
        if len(slept) == 3:
            gate.touch()

    monkeypatch.setattr(cost.time, "sleep", sleep)
    measured(monkeypatch, tmp_path, "--only", "idle@1", "--repeats", "1", "--after", str(gate))
    assert len(slept) == 3


@pytest.mark.parametrize("name", list(LOTS))
def test_lots_name_what_there_is(name: str) -> None:
    """Catches a shape, a variant or a batch that is not there, found out once all engines have started."""
    lot = LOTS[name]
    assert lot.shape in SHAPES
    for cell in lot.cells:
        variant, _, batches = cell.partition("@")
        assert variant in {*variants(2, 8), cost.CONTROL}
        assert all(batch == PREFILL or int(batch) > 0 for batch in batches.split(","))

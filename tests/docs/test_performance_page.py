# SPDX-License-Identifier: Apache-2.0
"""The performance page shows each newest figure and says whether the code on which it depends has changed since."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.build import DEPENDS_ON, builds_in, changed_for, digests, is_current

ROOT = Path(__file__).parents[2]
IDLE = "no steering, llama-8b"
ONE_SITE = "one site, every request, llama-8b"


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    """Modules of the generator, which import each other by their plain names."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import aims
        import measured
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return {"aims": aims, "measured": measured}


def cost(build: dict[str, str] | None) -> dict[str, Any]:
    """Return a result of ``cost.py`` with two variants at batch 1."""
    found = {"first token": 1.0, "per token": 1.0421, "spread": [1.0, 1.1], "throughput": 0.9, "lengths": [1, 8, 9],
             "stock ms per token": 4.0,
             "raw": {"steered": [[1.0, 2.0, 3.0421]], "stock": [[1.0, 2.0, 3.0]]}}  # fmt: skip
    environment = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3", "vllm": "0.32.0", "date": "2026-01-02"}
    return {
        "shape": "llama-8b", "graph_sets": 8, "tensor_parallel": 1,
        "variants": {"idle": {"1": found}, "one site": {"1": found}},
        "environment": environment if build is None else {**environment, "commit": None, "build": build},
    }  # fmt: skip


def rows(page: str) -> dict[str, str]:
    """Return the lines of the first table, by the first two cells."""
    lines = (line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| "))
    return {line.split(" | ")[0].removeprefix("| ") + "|" + line.split(" | ")[1]: line for line in lines}


@pytest.mark.parametrize(
    ("part", "on_page"),
    [(None, {IDLE, ONE_SITE}), ("server", {IDLE, ONE_SITE}), ("frontend", {IDLE, ONE_SITE}), ("program", {IDLE}),
     ("taps", set()), ("models/install.py", set()), ("no record", set())],
)  # fmt: skip
def test_changed_code_marks_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, ModuleType], part: str | None, on_page: set[str]
) -> None:
    """Catches an unmarked figure of code that has changed, and one that unrelated code marks."""
    now = digests()
    build = None if part == "no record" else {**now, **({part: "another"} if part else {})}
    (tmp_path / "gpu-cost-llama-8b.json").write_text(json.dumps(cost(build)))
    monkeypatch.setattr(scripts["measured"], "RESULTS", tmp_path)
    page = scripts["aims"].table_of_aims()
    for what in (IDLE, ONE_SITE):
        row = rows(page)[f"{what}|per token"]
        assert "| 1.042 (1) | `gpu-cost-llama-8b.json`, H200, 2026-01-02" in row and row.endswith("| no |"), row
        assert (scripts["aims"].CHANGED in row) == (what not in on_page), row
    assert scripts["aims"].NOT_MEASURED in rows(page)["no steering, gemma3-27b|per token"]
    of_this_build = sum(".json" in row and scripts["aims"].CHANGED not in row for row in rows(page).values())
    assert f"; {of_this_build} of " in page and bool(of_this_build) == bool(on_page)


def test_every_figure_that_is_older_than_its_code_is_marked(scripts: dict[str, ModuleType]) -> None:
    """Catches a page that was not generated after a change of the code that a figure depends on."""
    shown, now = rows((ROOT / "docs/reference/performance.md").read_text()), digests()
    for aim in scripts["aims"].AIMS:
        row = shown[f"{aim.what}|{aim.unit}"]
        now_found, found = (aim.figure(scripts["measured"].__dict__[fits]) for fits in ("current", "of_any_code"))
        assert (scripts["aims"].CHANGED in row) == (now_found is None and found is not None), row
        if now_found is None:
            continue
        for name in (part for part in row.split("`") if part.endswith(".json")):
            result = json.loads((ROOT / "benchmarks/results" / name).read_text())
            if name == "gpu-tests.json":
                result = {"runs": [run for run in result["runs"].values() if is_current(aim.kind, builds_in(run), now)]}
            builds = builds_in(result)
            assert builds, f"{name} does not record its code"
            assert [changed_for(aim.kind, build, now) for build in builds] == [[]] * len(builds), row


def test_kinds_depend_on_existing_parts() -> None:
    """Catches a renamed module that no figure depends on any more."""
    assert {part for parts in DEPENDS_ON.values() for part in parts} <= digests().keys()


def test_results_without_module_digests_are_compared_by_subpackage() -> None:
    """Catches a result that counts as of this code because it lacks a digest."""
    now = digests()
    older = {part: digest for part, digest in now.items() if "/" not in part}
    assert changed_for("idle steps", older, now) == []
    assert changed_for("idle steps", {**older, "models": "another"}, now) == ["models"]
    assert changed_for("idle steps", {**now, "models": "another"}, now) == []
    assert not is_current("idle steps", [], now)

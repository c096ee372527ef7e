# SPDX-License-Identifier: Apache-2.0
"""Sentences about runs on a GPU follow the file of outcomes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the generator with an empty folder of results."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import frontier_page

    monkeypatch.setattr(frontier_page, "RESULTS", tmp_path)
    return frontier_page


def write(page: Any, *rows: tuple[str, str, str]) -> None:
    environment = {"gpu": "NVIDIA H100", "torch": "2.13.0+cu130", "date": "2026-12-01"}
    found = [
        {"row": name, "architecture": name, "recipe": recipe, "outcome": outcome, "dtype": "bfloat16", "value": 0.003,
         "of_effect_at_median": 0.011, "environment": environment, "replaced": [f"norm of {name}"], "note": "cut"}
        for name, recipe, outcome in rows
    ]  # fmt: skip
    (page.RESULTS / "frontier-gpu.json").write_text(json.dumps({"rows": found}))


def test_without_outcomes(page: Any) -> None:
    """Catches a generator that needs a run, and failures shown as runs."""
    for _ in range(2):
        assert page.section().count("\n") == 2
        assert page.inkling() == "No run of Inkling's kernels on a GPU has been made."
        assert page.mixes() == "No run on a GPU with vLLM's own kernels of the mixes has been made.\n"
        write(page, ("Inkling", "CONVOLVED", "failed"), ("V4", "HYPER-CONNECTIONS", "skipped"))


def test_with_outcomes(page: Any) -> None:
    """Catches sentences that stay when runs have passed, and rows without their device, date and note."""
    write(page, ("Inkling", "CONVOLVED", "passed"), ("V4", "HYPER-CONNECTIONS", "passed"), ("V3", "FUSED", "failed"))
    assert "have run" in page.inkling()
    assert "`V4`" in page.mixes() and "Inkling" not in page.mixes()
    shown = page.section()
    assert "`V4` | HYPER-CONNECTIONS" in shown and "1.1% | NVIDIA H100, torch 2.13.0, 2026-12-01" in shown
    assert "formula instead of a kernel: norm of V4; cut" in shown
    assert "V3" not in shown

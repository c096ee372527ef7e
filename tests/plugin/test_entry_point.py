# SPDX-License-Identifier: Apache-2.0
"""Tests of what the plug-in changes in a front end of vLLM, each in a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.repo.tree import ROOT
from tests.tiny import save_tiny_llama
from tests.warm import RUN_MODULE, run_warm
from vllm_steer.compat.stages import REQUEST_STAGES, STARTUP, checks_without_steering, front_end_joins

EXTENDED = {
    *(f"vllm.outputs:CompletionOutput.{name}" for name in ("capture_results", "capture_rows")),
    *(f"vllm.outputs:CompletionOutput.{name}" for name in ("readouts", "steering_trace")),
    *(f"vllm.outputs:RequestOutput.{name}" for name in ("capture_results", "steering_applied")),
}
OURS = "vllm_steer.server.http.middleware"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def changes(model: Path, *words: str, plugins: str = "steering") -> Any:
    """Return the output of ``changes.py``."""
    words = ("tests.plugin.changes", str(model), *words)
    done = run_warm(RUN_MODULE, *words, environment={**os.environ, "VLLM_PLUGINS": plugins}, folder=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("changes ")]
    return json.loads(line.removeprefix("changes "))


@pytest.mark.parametrize("serves", [True, False])
def test_without_the_flag_only_the_start_and_the_check_of_requests_change(model: Path, serves: bool) -> None:
    """Catches a middleware, a route, an attribute, or a wrap on outputs in every engine of an installation."""
    mode = "server" if serves else "offline"
    stock, installed = (changes(model, mode, plugins=plugins) for plugins in ("none", "steering"))
    assert stock["names"] == stock["attributes"] == []
    joins = (*STARTUP, *checks_without_steering(serves=serves))
    assert installed == {**stock, "names": sorted(join.method for join in joins)}


def test_without_the_flag_nothing_runs_on_the_way_back() -> None:
    """Catches a check that is added to the output path: one per request is allowed, one per event is not."""
    back = {"output processor", "response"}
    events = {join.method for stage in REQUEST_STAGES if stage.name in back for join in stage.joins}
    assert len(events) > 8
    checks = {join.method for serves in (True, False) for join in checks_without_steering(serves=serves)}
    assert checks.isdisjoint(events)


def test_the_flag_changes_what_the_stages_list(model: Path) -> None:
    """Negative control: catches a comparison that finds nothing, and a change that the list lacks."""
    found = changes(model, "server", "--enable-steering")
    assert found["names"] == sorted({join.method for join in (*STARTUP, *front_end_joins()) if join.is_wrap})
    assert set(found["attributes"]) == EXTENDED
    assert OURS in found["middleware"]

# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer fuzz``: what it prints, writes and returns; the oracle itself does not run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_steer.cli.main import app
from vllm_steer.cli.output import check_outputs
from vllm_steer.testing.fuzz import model, session
from vllm_steer.testing.fuzz.compare import Counts
from vllm_steer.testing.fuzz.workload import Request, Settings, Workload

SMALL = Workload(settings=Settings(), requests=[Request(name="r1", prompt=[1, 2], max_tokens=3)])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the arguments of sessions. Each session returns ``made["findings"]``."""
    seen: dict[str, Any] = {"findings": [], "counts": Counts(requests=9)}

    def run(self: session.Session) -> session.Report:
        seen.update(seed=self.seed, minutes=self.minutes, model=self.model, points=self.points)
        return session.Report(self.seed, seconds=90.0, counts=seen["counts"], findings=seen["findings"])

    monkeypatch.setattr(session.Session, "run", run)
    monkeypatch.setattr(model, "save_tiny_llama", lambda folder: folder)
    monkeypatch.setattr(model, "prepare_environment", lambda: None)
    return seen


def test_nothing_found(made: dict[str, Any], tmp_path: Path) -> None:
    """Catches options that do not reach the session, and a result without what it was made with."""
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["fuzz", "a-model", "--minutes", "2", "--seed", "5", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "no findings in 1.5 minutes" in done.output
    assert (made["seed"], made["minutes"], made["model"]) == (5, 2.0, "a-model")
    written = json.loads(out.read_text())
    assert written["command"] == "vllm-steer fuzz --minutes 2 --seed 5 --requests 48 --dtype float32"
    assert written["findings"] == []


def test_a_file_that_cannot_be_written(made: dict[str, Any], tmp_path: Path) -> None:
    """Catches findings that are lost at the end of a run, and a file that is emptied ahead of it."""
    done = CliRunner().invoke(app, ["fuzz", "a-model", "--out", str(tmp_path / "none" / "out.json")])
    assert done.exit_code == 1
    assert "folder not found: " in done.output
    assert "model" not in made
    earlier = tmp_path / "out.json"
    earlier.write_text("earlier")
    check_outputs(earlier)
    assert earlier.read_text() == "earlier"


def test_nothing_compared(made: dict[str, Any]) -> None:
    """Catches a run that ends before its first comparison and counts as a success."""
    made["counts"] = Counts()
    done = CliRunner().invoke(app, ["fuzz", "a-model"])
    assert done.exit_code == 1
    assert "no request was compared" in done.output


def test_points_on_the_branches(made: dict[str, Any]) -> None:
    """Catches a session that never uses the points that it was asked to, and a traceback for a misspelt one."""
    assert CliRunner().invoke(app, ["fuzz", "a-model", "--points", "mlp_out,attn_out"]).exit_code == 0
    assert made["points"] == ("attn_out", "mlp_out")
    done = CliRunner().invoke(app, ["fuzz", "a-model", "--points", "pre_attn"])
    assert done.exit_code == 2
    assert "attn_out, mlp_in, mlp_out" in done.output.replace("\n", " ")


def test_a_finding_is_printed_so_that_it_can_be_run_again(made: dict[str, Any]) -> None:
    """Catches a finding that ends in status 0, or whose workload is not printed whole."""
    made["findings"] = [session.Finding(3, {"r1": "never finished"}, SMALL)]
    done = CliRunner().invoke(app, ["fuzz"])
    assert done.exit_code == 1
    assert "round 3: never finished" in done.output
    assert Workload.from_json(done.output.strip().splitlines()[-1]) == SMALL


@pytest.mark.parametrize(("problems", "status"), [({}, 0), ({"r1": "never finished"}, 1)])
def test_replay(
    problems: dict[str, str], status: int, made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "replay", lambda model, dtype, text: Workload.from_json(text) and problems)
    path = tmp_path / "finding.json"
    path.write_text(SMALL.to_json())
    assert CliRunner().invoke(app, ["fuzz", "--replay", str(path)]).exit_code == status
    path.write_text('{"settings": 1}')
    assert CliRunner().invoke(app, ["fuzz", "--replay", str(path)]).exit_code == 2

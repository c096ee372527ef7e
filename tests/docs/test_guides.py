# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the guides on modules, capture and the doctor run."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.docs.markdown import blocks
from tests.docs.runner import blocks_of, offline_blocks, run_python
from tests.repo.tree import read
from vllm_steer.cli import doctor
from vllm_steer.cli.main import app
from vllm_steer.config import SWITCHES
from vllm_steer.server.routes.capabilities import ROUTE


@pytest.mark.slow
def test_modules_guide_runs() -> None:
    """Catches an example that no longer runs, a module without effect, and unreported global steering."""
    applied = "steered.steering_applied.global_steering == status.digest, unsteered.steering_applied is None"
    differ = "steered.outputs[0].text != unsteered.outputs[0].text"
    names = "[module.name for module in llm.steering.list().data]"
    shown = run_python(offline_blocks("docs/guides/modules.md"), f"[{applied}, {differ}, {names}]")
    assert shown == [True, True, True, ["calm", "terse"]]


@pytest.mark.slow
def test_capture_guide_runs() -> None:
    """Catches an example that no longer runs, a consumer that receives no rows, and requests or rows out of order."""
    streamed = "[len(streamed) > 4, streamed == complete]"
    shown = run_python(
        offline_blocks("docs/guides/capture.md"),
        f"[rows.status, result.status, [request.tag for request in captures], captures.missing(), {streamed}]",
    )
    assert shown == ["ok", "ok", [None, "The list of", "Return the value of"], [], [True, True]]


DOCTOR = "docs/guides/doctor.md"


@pytest.mark.slow
def test_doctor_guide_runs() -> None:
    """Catches an example that no longer runs, and an engine that skipped the self-check."""
    assert run_python(blocks_of(DOCTOR, "python"), "facts['self_check']['ran']") is True


def test_doctor_guide_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an unknown flag. tests/cli covers what the commands do."""
    calls: list[Any] = []
    monkeypatch.setattr(doctor, "run", lambda *args, **kwargs: calls.append((args, kwargs)))
    lines = [block.code.strip() for block in blocks(read(DOCTOR)) if block.language == "bash"]
    commands = [line for line in lines if line.startswith(".venv/bin/vllm-steer ")]
    for line in commands:
        result = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert len(calls) == len(commands) == 3
    assert [line for line in lines if line not in commands] == [f"curl -s http://localhost:8000{ROUTE}"]


def test_doctor_guide_names_the_switches() -> None:
    """Catches a switch that the guide does not mention."""
    assert all(switch.flag in read(DOCTOR) for switch in SWITCHES)

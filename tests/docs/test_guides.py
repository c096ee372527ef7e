# SPDX-License-Identifier: Apache-2.0
"""The guides' blocks run."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.docs.markdown import Block, blocks
from tests.docs.test_readme import run_python
from tests.repo.tree import read
from vllm_steer.cli import doctor
from vllm_steer.cli.main import app
from vllm_steer.config import SWITCHES
from vllm_steer.server.routes.capabilities import ROUTE


def python_blocks(guide: str, *, client: bool) -> list[Block]:
    """The guide's blocks that talk to a server, or the others."""
    return [b for b in blocks(read(guide)) if b.language == "python" and ("Client(" in b.code) == client]


@pytest.mark.slow
def test_the_modules_guide_runs() -> None:
    """Catches an example that no longer runs, a module that does nothing, and global steering that says nothing."""
    applied = "everybody.steering_applied.global_steering == status.digest, nobody.steering_applied is None"
    differ = "everybody.outputs[0].text != nobody.outputs[0].text"
    names = "[module.name for module in llm.steering.list().data]"
    shown = run_python(python_blocks("docs/guides/modules.md", client=False), f"[{applied}, {differ}, {names}]")
    assert shown == [True, True, True, ["calm", "terse"]]


@pytest.mark.slow
def test_the_capture_guide_runs() -> None:
    """Catches an example that no longer runs, and a consumer that answers without rows."""
    shown = run_python(
        python_blocks("docs/guides/capture.md", client=False),
        "[rows.status, result.status, len(list(open_captures(root)))]",
    )
    assert shown == ["ok", "ok", 1]


DOCTOR = "docs/guides/doctor.md"


@pytest.mark.slow
def test_the_doctor_guide_runs() -> None:
    """Catches an example that no longer runs, and a check that it praises and that did not run."""
    python_blocks = [block for block in blocks(read(DOCTOR)) if block.language == "python"]
    assert run_python(python_blocks, "facts['self_check']['ran']") is True


def test_the_doctor_guides_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a flag that the command does not have. What the commands do is tested in tests/cli."""
    asked: list[Any] = []
    monkeypatch.setattr(doctor, "run", lambda *args, **kwargs: asked.append((args, kwargs)))
    lines = [block.code.strip() for block in blocks(read(DOCTOR)) if block.language == "bash"]
    commands = [line for line in lines if line.startswith(".venv/bin/vllm-steer ")]
    for line in commands:
        result = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert len(asked) == len(commands) == 3
    assert [line for line in lines if line not in commands] == [f"curl -s http://localhost:8000{ROUTE}"]


def test_the_doctor_guide_names_the_switches() -> None:
    """Catches a switch that is documented under another name."""
    assert all(switch.flag in read(DOCTOR) for switch in SWITCHES)

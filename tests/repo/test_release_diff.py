# SPDX-License-Identifier: Apache-2.0
"""Tests of the work list of a vLLM release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripts.release_diff import app
from scripts.releases.work_list import compare, write_report
from tests.repo.tree import ROOT
from vllm_steer.compat.seam_digests import changes, recorded
from vllm_steer.compat.sources import SourceTree

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler.schedule"


def files(
    body: str = "return 1", arguments: str = "self", field: str = "seed", variable: str = "VLLM_A"
) -> dict[str, str]:
    """Return the files of a version with one seam, one engine argument and one environment variable."""
    return {
        "vllm/__init__.py": "",
        "vllm/v1/core/sched/scheduler.py": f"class Scheduler:\n    def schedule({arguments}):\n        {body}\n",
        "vllm/engine/arg_utils.py": f"class EngineArgs:\n    {field}: int = 0\n",
        "vllm/envs.py": f"environment_variables = {{'{variable}': lambda: 1}}\n",
    }


def report(**new: str) -> str:
    """Return the report on a version that differs from :func:`files` in ``new``."""
    return write_report(compare(SourceTree(files(), "1"), SourceTree(files(**new), "2")), with_source=True)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ({"body": "return 2"}, rf"`{SCHEDULER}` \| override \| source \| \+1 -1 \| `engine\.scheduler"),
        ({"body": "return 2"}, r"-    return 1\n\+    return 2"),
        ({"body": "return 2"}, "Tests of the changed seams: `tests/engine`"),
        ({"arguments": "self, x=1"}, rf"\* `{SCHEDULER}`: `\(self\)` to `\(self, x=1\)`"),
        ({"field": "seeds"}, "Engine arguments, new: `seeds`; gone: `seed`"),
        ({"variable": "VLLM_B"}, "Environment variables, new: `VLLM_B`; gone: `VLLM_A`"),
        ({"variable": "VLLM_B"}, "Without a row in `scripts/releases/settings.py`: `VLLM_B`"),
        ({"field": "monokernel"}, r"\| `monokernel` \| refused \|"),
    ],
)
def test_reports_a_difference(new: dict[str, str], expected: str) -> None:
    """Catches a release whose change does not reach the work list."""
    assert re.search(expected, report(**new))
    assert not re.search(expected, report())


def test_the_command_writes_a_report(tmp_path: Path) -> None:
    """Catches a command that does not read folders, and a traceback for a file or folder that does not exist."""
    for name, each in (("old", files()), ("new", files(body="return 2"))):
        for path, text in each.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
    arguments = [str(tmp_path / "new"), "--old", str(tmp_path / "old"), "--output", str(tmp_path / "page.md")]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert SCHEDULER in (tmp_path / "page.md").read_text()
    arguments[-1] = str(tmp_path / "none" / "page.md")
    lost = CliRunner().invoke(app, arguments)
    assert lost.exit_code == 2
    assert "page.md cannot be written: No such file or directory" in lost.output
    wrong = CliRunner().invoke(app, [str(tmp_path / "missing.whl")])
    assert wrong.exit_code == 2
    assert "missing.whl" in wrong.output


@pytest.mark.parametrize(("old", "new"), [("0.32.0", "0.33.0")])
def test_pages_list_the_recorded_changes(old: str, new: str) -> None:
    """Catches a page that was not written again after the table of seams changed."""
    page = (ROOT / "docs" / "design" / "releases" / f"{new.removesuffix('.0')}.md").read_text()
    changed = changes(recorded()[old], recorded()[new])
    rows = re.findall(r"^\| `(vllm[\w.]*:[\w.]*)` \| (\w+) \| (\w+) \| [^|]* \| (.*) \|$", page, re.MULTILINE)
    expected = {
        (change.seam.path, change.seam.kind.value, change.summary, change.seam.ours.removeprefix("vllm_steer."))
        for change in changed
    }
    assert {(*row[:3], row[3].strip("`") if row[3].startswith("`") else "") for row in rows} == expected


@pytest.mark.parametrize("version", ["0.33"])
def test_pages_have_no_setting_without_a_verdict(version: str) -> None:
    """Catches a new setting of vLLM that was never compared with steering."""
    page = (ROOT / "docs" / "design" / "releases" / f"{version}.md").read_text()
    assert "* Without a row in `scripts/releases/settings.py`: none\n" in page
    assert "| `monokernel` | refused |" in page or version != "0.33"

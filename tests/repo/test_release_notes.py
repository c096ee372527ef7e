# SPDX-License-Identifier: Apache-2.0
"""`scripts/release_notes.py`."""

from types import ModuleType

import pytest

from tests.repo.tree import load_script, read
from vllm_steer._version import __version__
from vllm_steer.compat.version import TESTED_RANGE

LOG = """# Changelog

Intro.

## [Unreleased]

### Added

**Tools**

- Add a thing
  in two lines.
- Add another; see
  the guide.

## [0.2.0] - 2026-01-02

### Fixed

- Repair it.

## [0.1.0]
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("release_notes")


def test_notes_are_the_section_of_the_version(script: ModuleType) -> None:
    """Catches notes that contain another version's changes, or lose the date."""
    text = script.notes(LOG, "0.2.0", "0.32.x", "0.32.0")
    assert text.startswith("# vllm-steer 0.2.0 (2026-01-02)\n")
    assert "- Repair it." in text
    assert "Tested with vLLM 0.32.x." in text
    assert 'pip install "vllm-steer[cuda]==0.2.0"    # with vLLM 0.32.0' in text
    assert "Add a thing" not in text and "[0.1.0]" not in text


def test_entries_become_one_line(script: ModuleType) -> None:
    """Catches entries whose line breaks a release page keeps, and entries or headings that are joined."""
    text = script.notes(LOG, "Unreleased", "0.32.x", "0.32.0")
    assert "### Added\n\n**Tools**\n\n- Add a thing in two lines.\n- Add another; see the guide.\n" in text
    assert text.startswith("# Unreleased changes\n")
    assert "==" not in text


@pytest.mark.parametrize(
    ("version", "message"), [("0.3.0", r"no section for 0\.3\.0; it has: Unreleased, 0\.2\.0"), ("0.1.0", "no entry")]
)
def test_missing_notes_are_refused(script: ModuleType, version: str, message: str) -> None:
    """Catches an empty release page."""
    with pytest.raises(script.NotesError, match=message):
        script.section(LOG, version)


def test_the_change_log_has_notes(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a change log or tables that the script cannot read, and a current version without notes."""
    monkeypatch.setattr("sys.argv", ["release_notes.py", __version__])
    assert script.main() == 0
    printed = capsys.readouterr().out
    assert f"Tested with vLLM {TESTED_RANGE}." in printed
    assert printed.count("\n- ") == read("CHANGELOG.md").count("\n- ") > 3

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the notes of a release in Markdown, from the change log.

    python scripts/release_notes.py                the unreleased changes
    python scripts/release_notes.py 0.1.0          a version

Each entry becomes one line, as pages of releases keep line breaks. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "Unreleased"
_HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?\s*$", re.MULTILINE)
_TESTED = re.compile(r'^TESTED_RANGE = "([^"]+)"', re.MULTILINE)
_CUDA = re.compile(r'^cuda = \["vllm==([^"]+)"\]', re.MULTILINE)


class NotesError(Exception):
    """Reason why the notes cannot be written, one sentence."""


def section(change_log: str, version: str) -> tuple[str, str]:
    """Return date and text of the section of a version.

    Args:
        change_log: The text of the change log.
        version: A version, or ``Unreleased``.

    Returns:
        The date, empty if the section has none, and the text below the heading.

    Raises:
        NotesError: The change log has no such section, or the section is empty.
    """
    headings = list(_HEADING.finditer(change_log))
    for number, heading in enumerate(headings):
        if heading[1] != version:
            continue
        end = headings[number + 1].start() if number + 1 < len(headings) else len(change_log)
        text = change_log[heading.end() : end].strip()
        if not re.search(r"^- ", text, re.MULTILINE):
            raise NotesError(f"the section of {version} in CHANGELOG.md has no entry")
        return heading[2] or "", text
    known = ", ".join(heading[1] for heading in headings)
    raise NotesError(f"CHANGELOG.md has no section for {version}; it has: {known}")


def unwrapped(text: str) -> str:
    """Return Markdown in which every entry and paragraph is one line."""
    lines: list[str] = []
    for line in text.splitlines():
        continues = bool(line.strip()) and not re.match(r"\s*(?:[-*#|]|\*\*)", line)
        if continues and lines and lines[-1].strip() and not lines[-1].startswith("#"):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line.rstrip())
    return "\n".join(lines)


def notes(change_log: str, version: str, tested: str, vllm: str) -> str:
    """Return the notes of a version.

    Args:
        change_log: The text of the change log.
        version: A version, or ``Unreleased``.
        tested: The tested versions of vLLM.
        vllm: The version of vLLM that the extras install.
    """
    date, text = section(change_log, version)
    name = "Unreleased changes" if version == UNRELEASED else f"vllm-steer {version}"
    pin = "" if version == UNRELEASED else f"=={version}"
    return "\n".join(
        (
            f"# {name}{f' ({date})' if date else ''}",
            "",
            f"Tested with vLLM {tested}.",
            "",
            "```bash",
            f'pip install "vllm-steer[cuda]{pin}"    # with vLLM {vllm}',
            "```",
            "",
            unwrapped(text),
            "",
        )
    )


def found(pattern: re.Pattern[str], path: Path) -> str:
    """Return the first group of ``pattern`` in a file."""
    match = pattern.search(path.read_text())
    if match is None:
        raise NotesError(f"{path.relative_to(ROOT)} has no line like {pattern.pattern}")
    return match[1]


def main() -> int:
    """Print the notes; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("version", nargs="?", default=UNRELEASED)
    options = parser.parse_args()
    try:
        tested = found(_TESTED, ROOT / "vllm_steer/compat/version.py")
        vllm = found(_CUDA, ROOT / "pyproject.toml")
        print(notes((ROOT / "CHANGELOG.md").read_text(), options.version, tested, vllm), end="")
    except NotesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Part of the architectures that a test run proves: an eighth, another one for every commit.

``CONFORMANCE=all`` proves all of them, ``newest`` the layer classes that the installed vLLM alone has
(``selection.py``), and ``CONFORMANCE_PART`` selects a part. A row's part follows from its name, so it
does not change when rows are added.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from functools import cache
from pathlib import Path
from typing import Final

EVERYTHING: Final = os.environ.get("CONFORMANCE") == "all"
NEWEST: Final = os.environ.get("CONFORMANCE") == "newest"
PARTS: Final = 8


@cache
def current_part() -> int:
    """Return the part of this run, from the hash of the commit; 0 outside a git checkout."""
    given = os.environ.get("CONFORMANCE_PART")
    if given is not None:
        return int(given) % PARTS
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return int(commit[:8] or "0", 16) % PARTS


def part_of(name: str) -> int:
    """Return the part that a row belongs to."""
    return zlib.crc32(name.encode()) % PARTS


def selected(name: str) -> bool:
    """Return whether this run proves a row."""
    return EVERYTHING or part_of(name) == current_part()


def describe() -> str:
    """Return one sentence about the part, for the summary of a test run."""
    if EVERYTHING:
        return "conformance: all architectures"
    if NEWEST:
        return "conformance: layer classes that no other version of vLLM has"
    return f"conformance: part {current_part() + 1} of {PARTS} of the architectures; CONFORMANCE=all proves all"

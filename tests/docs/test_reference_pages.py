# SPDX-License-Identifier: Apache-2.0
"""The generated parts of the documentation match the tables in the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pages_are_up_to_date() -> None:
    """Catches a table that was changed without regenerating its page."""
    command = [sys.executable, "scripts/reference.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr

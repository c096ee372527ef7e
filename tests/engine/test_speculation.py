# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding, in a process of its own.

After an n-gram proposer, vLLM 0.32 cannot start another engine in the same process on CPU: its kernel registry
(``triton_utils/dispatcher.py``) looks through all modules and stumbles over numba's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_speculative_decoding() -> None:
    """Runs ``speculation_cases.py``, whose tests say what they catch."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine/speculation_cases.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "1 passed" in done.stdout

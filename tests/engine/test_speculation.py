# SPDX-License-Identifier: Apache-2.0
"""Tests of speculative decoding, in a process of its own.

After an n-gram proposer, vLLM 0.32 cannot start another engine in the same process on CPU: its kernel registry
(``triton_utils/dispatcher.py``) inspects all modules and fails at numba's.
"""

from __future__ import annotations

import os

import pytest

from tests.engine.mtp_models import PROVEN
from tests.repo.tree import ROOT
from tests.warm import RUN_MODULE, run_warm

_SECONDS = 900
pytestmark = pytest.mark.timeout(_SECONDS + 60)


@pytest.mark.failure(17)
@pytest.mark.failure(17, control=True)
@pytest.mark.feature("reset_prefix_cache", "react")
@pytest.mark.feature("speculative decoding, n-gram", "steer", "capture", "react")
def test_n_gram() -> None:
    """Run ``speculation_cases.py``, whose tests name what they catch."""
    _run("speculation_cases.py", 10)


@pytest.mark.feature("speculative decoding, draft model and EAGLE", "steer", "capture", "react")
@pytest.mark.feature("draft models and EAGLE heads, which are not steered", "steer", "capture")
def test_draft_models() -> None:
    """Run ``drafter_cases.py``, whose tests name what they catch."""
    _run("drafter_cases.py", 2)


@pytest.mark.feature("speculative decoding, layers for multi-token prediction (MTP)", "steer", "capture", "react")
@pytest.mark.feature("MTP layers, which are not steered", "steer", "capture")
def test_mtp_layers() -> None:
    """Run ``mtp_cases.py``, whose test names what it catches."""
    _run("mtp_cases.py", len(PROVEN))


def _run(file: str, passed: int) -> None:
    words = ("pytest", "-q", "-p", "no:cacheprovider", f"tests/engine/{file}")
    done = run_warm(RUN_MODULE, *words, environment=os.environ, folder=ROOT, timeout=_SECONDS)
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{passed} passed" in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""Proof of a model that HF Transformers does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_steer.cli.doctor import _run_module
from vllm_steer.testing.prove.engine import MARK


@pytest.mark.slow
def test_proof_without_reference_is_conclusive(tmp_path: Path) -> None:
    """Catches weights so small that no hop is conclusive."""
    found = _run_module("vllm_steer.testing.prove.engine", MARK, "demo/model", str(tmp_path / "none"))
    assert (found["kind"], found["hops"], found["conclusive"]) == ("identities inside vLLM", 8, 8)
    assert (found["value_error"], found["agrees"]) == (None, True)

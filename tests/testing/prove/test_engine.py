# SPDX-License-Identifier: Apache-2.0
"""The half of a proof that runs in vLLM, where HF Transformers has no model to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_steer.cli.doctor import _run_module
from vllm_steer.testing.prove.engine import MARK


@pytest.mark.slow
def test_without_a_reference_the_identities_are_checked_and_tell(tmp_path: Path) -> None:
    """Catches weights so small that no step tells anything, which would pass for a proof."""
    found = _run_module("vllm_steer.testing.prove.engine", MARK, "demo/model", str(tmp_path / "none"))
    assert (found["kind"], found["hops"], found["conclusive"]) == ("identities inside vLLM", 8, 8)
    assert (found["value_error"], found["agrees"]) == (None, True)

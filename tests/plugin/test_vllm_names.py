# SPDX-License-Identifier: Apache-2.0
"""Tests of the names in ``vllm``: unchanged by an import of this package, replaced by ``install``."""

from __future__ import annotations

import subprocess
import sys

import pytest

VLLMS = "vllm.entrypoints.llm vllm.sampling_params"
OURS = "vllm_steer.llm vllm_steer.params"


def names_after(*statements: str) -> list[str]:
    """Return, for each statement, the modules of ``vllm.LLM`` and ``vllm.SamplingParams`` after it, in one process."""
    show = "import vllm; print('names', vllm.LLM.__module__, vllm.SamplingParams.__module__)"
    script = "\n".join(f"{statement}\n{show}" for statement in statements)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [line.removeprefix("names ") for line in done.stdout.splitlines() if line.startswith("names ")]


@pytest.mark.parametrize("first", ["import vllm_steer", "import vllm"])
def test_only_install_replaces_the_names(first: str) -> None:
    """Catches an import or a plugin that changes every script's classes, and an ``install`` without effect."""
    assert names_after(
        first,
        "import vllm_steer; from vllm_steer import LLM, AsyncLLM, SamplingParams",
        "import vllm.plugins; vllm.plugins.load_general_plugins()",
        "vllm_steer.install()",
        "vllm_steer.install()",
    ) == [VLLMS, VLLMS, VLLMS, OURS, OURS]

# SPDX-License-Identifier: Apache-2.0
"""The guides' blocks run."""

from __future__ import annotations

import pytest

from tests.docs.markdown import blocks
from tests.docs.test_readme import run_python
from tests.repo.tree import read


@pytest.mark.slow
def test_the_capture_guide_runs() -> None:
    """Catches an example that no longer runs, and a consumer that answers without rows."""
    python_blocks = [block for block in blocks(read("docs/guides/capture.md")) if block.language == "python"]
    shown = run_python(python_blocks, "[rows.status, result.status, len(list(open_captures(root)))]")
    assert shown == ["ok", "ok", 1]

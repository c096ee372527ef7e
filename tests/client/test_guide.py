# SPDX-License-Identifier: Apache-2.0
"""The client example of the guide on modules."""

from __future__ import annotations

from dataclasses import replace

from tests.docs.markdown import Block
from tests.docs.runner import client_blocks, run_python
from tests.registry.modules import vector


def test_client_example_of_the_modules_guide(url: str) -> None:
    """Catches an example of the client that no longer runs."""
    (block,) = client_blocks("docs/guides/modules.md")
    before = Block("python", f"direction = {vector(1).tolist()}", 1)
    asked = replace(block, code=block.code.replace("http://localhost:8000", url))
    assert run_python([before, asked], "answer.text")[:9] == "I am calm"  # type: ignore[index]

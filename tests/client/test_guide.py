# SPDX-License-Identifier: Apache-2.0
"""The client example of the guide on modules."""

from __future__ import annotations

from dataclasses import replace

from tests.docs.runner import client_blocks, run_python
from tests.server.fakes import HIDDEN


def test_client_example_of_the_modules_guide(url: str) -> None:
    """Catches an example of the client that no longer runs."""
    (block,) = client_blocks("docs/guides/modules.md")
    code = block.code.replace("http://localhost:8000", url).replace(
        "standard_normal(256)", f"standard_normal({HIDDEN})"
    )
    shown = run_python(
        [replace(block, code=code)], "[answer.text[:9], capture.sites['post_block', 1].rows.tolist()]", warm=False
    )
    assert shown == ["I am calm", [[1.0, 2.0]]]

# SPDX-License-Identifier: Apache-2.0
"""The example of the ``openai`` client, against the server that the tests of this folder share."""

from __future__ import annotations

from tests.docs.test_examples import run_example
from tests.server.server import HIDDEN


def test_openai_client_steers_and_captures(url: str) -> None:
    """Catches fields that the openai client no longer sends or returns."""
    shown = run_example("openai_client.py", url, "1")
    assert shown["capture"] == f"ok, shape (1, {HIDDEN})"
    assert shown["plain"] != shown["steered"]

# SPDX-License-Identifier: Apache-2.0
"""GPU: hook points of models with quantised weights or a quantised key-value cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.engine import prepare_environment

prepare_environment()

from tests.conformance.quantised import CACHES, GPU_SCHEMES, SCHEMES, Scheme, examine  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scheme", [*SCHEMES, *GPU_SCHEMES, *CACHES], ids=str)
def test_hook_points_under_quantisation(scheme: Scheme, tmp_path: Path) -> None:
    """Catches edits and rows that quantised layers move, and weights that are read in another order."""
    examine(scheme, tmp_path)

# SPDX-License-Identifier: Apache-2.0
"""Selects the runner that each test file names as ``RUNNER``; the default is V2, as in vLLM on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.conftest import tiny_llama  # noqa: F401
from tests.gpu.runner import choose_runner


@pytest.fixture(scope="module", autouse=True)
def runner(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        choose_runner(patch, getattr(request.module, "RUNNER", "1"))
        yield

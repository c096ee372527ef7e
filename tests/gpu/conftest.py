# SPDX-License-Identifier: Apache-2.0
"""Each file's engines have the runner that it names (``RUNNER``), or V2, which users of GPUs have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.runner import choose_runner


@pytest.fixture(scope="module", autouse=True)
def runner(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        choose_runner(patch, getattr(request.module, "RUNNER", "1"))
        yield

# SPDX-License-Identifier: Apache-2.0
"""Setting of the C library's allocator."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.server.http.answers import make_capturing_app
from tests.server.test_lifespan import Server
from vllm_steer.server import lifespan

_FAULTS = """
import resource, sys
import numpy as np
from vllm_steer.server.malloc import keep_freed_memory

set_here = keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(1 << 20, np.uint8) for _ in range(48)]
    del blocks
print(set_here, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of(**variables: str) -> tuple[bool, int]:
    """Return whether a process has set its allocator, and the page faults of 48 MiB that it uses again."""
    env = {**os.environ, **variables}
    made = subprocess.run([sys.executable, "-c", _FAULTS], env=env, capture_output=True, text=True, check=True)
    set_here, faults = made.stdout.split()
    return set_here == "True", int(faults)


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="another C library")  # type: ignore[operator]
def test_freed_memory_is_kept_and_the_operator_decides() -> None:
    """Catches page faults for the rows of every few steps, and an operator's setting that is overridden."""
    kept, few = faults_of()
    overridden, many = faults_of(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept and not overridden
    assert few < 1000 < many


async def test_servers_set_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that starts with the default setting."""
    calls = []
    monkeypatch.setattr(lifespan, "keep_freed_memory", lambda: calls.append(1))
    server = Server(make_capturing_app([]))
    await server.tell("startup")
    await server.tell("shutdown")
    await server.task
    assert calls == [1]

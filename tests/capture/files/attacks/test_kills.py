# SPDX-License-Identifier: Apache-2.0
"""Writers that are killed at random moments: nothing that was acknowledged is lost, nothing half is shown as whole."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.capture.captured import assert_same, captured
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files.reader import open_captures

KILLS = 50


def request_number(number: int):
    return captured(f"r{number}", seed=number, rows=number % 40, width=512)


@pytest.mark.parametrize("layout", ["per_request", "packed", "sharded"])
def test_kills_at_random_moments(tmp_path: Path, layout: str) -> None:
    """Catches acknowledged requests that a SIGKILL loses, incomplete ones shown as whole, and a start without repair.

    A writer forks; each child opens the directory, as the next start does, and is killed in the middle of writing.
    """
    generator = random.Random(layout)
    acknowledged: set[int] = set()
    first = 0
    for _ in range(KILLS):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                consumer = FilesystemConsumer(
                    root=str(tmp_path), layout=layout, max_requests=None if layout == "per_request" else 7
                )
                number = first
                while True:
                    consumer.accept(request_number(number))
                    os.write(writing, number.to_bytes(8, "little"))
                    number += 1
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as acks:
            for _ in range(generator.randint(0, 12)):
                acknowledged.add(int.from_bytes(acks.read(8), "little"))
            for _ in range(generator.randrange(3000)):  # another moment between two acknowledgements
                pass
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            while number := acks.read(8):
                acknowledged.add(int.from_bytes(number, "little"))
        first = max(acknowledged, default=-1) + 2  # the request after the last one may be stored or not
        check(tmp_path, acknowledged)
    FilesystemConsumer(root=str(tmp_path), layout=layout).close()
    check(tmp_path, acknowledged)
    assert len(acknowledged) > KILLS
    assert not list(tmp_path.glob(".*"))


def check(root: Path, acknowledged: set[int]) -> None:
    """Check that all acknowledged requests are stored, and every stored request is whole."""
    stored = {int(request.request_id[1:]): request for request in open_captures(root)}
    assert acknowledged <= stored.keys(), f"lost: {sorted(acknowledged - stored.keys())}"
    for number in sorted(stored)[-20:]:
        assert_same(stored[number], request_number(number))

# SPDX-License-Identifier: Apache-2.0
"""Tests of registry writers that are killed at random moments."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.registry.backends import Backend
from tests.registry.modules import registry
from tests.repo.tree import ROOT

pytestmark = pytest.mark.slow
ROUNDS, WRITERS = 10, 2
# A process of its own with one thread, which may fork: the writers need not load anything. Each writes down a module's
# name and digest when its change has returned or, for the control, before it is made.
HARNESS = """
import json, os, random, signal, sys, time
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.storage import open_store
from vllm_steer.registry.module import parse_module
from vllm_steer.registry.index import RegistryLimits
root, rounds, writers, early = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "early"
if "://" in root:
    import psycopg, vllm_steer.registry.database
draw = random.Random(0)

def write(number, pipe):
    store = open_store(root)
    for i in range(10_000):
        name = f"m{number}.{i % 4}"  # no other writer replaces it, so that each kill counts
        module = parse_module({"base": {"post_block": {1: [float(number + 1), float(i)] * 4}}})
        line = f"{name} {module.digest}\\n".encode()
        os.write(pipe, line if early else b"begin\\n")
        store.change(lambda old: old.with_module(name, module, ModuleMetadata(), 0.0, RegistryLimits()))
        if not early:
            os.write(pipe, line)

acknowledged, count, midway = {}, 0, 0
for round_ in range(rounds):
    running = []
    for i in range(writers):
        reader, pipe = os.pipe()
        pid = os.fork()
        if pid == 0:
            for each in (reader, *(other for _, other in running)):
                os.close(each)  # so that this process ends with its parent
            write(round_ * writers + i, pipe)
        os.close(pipe)
        running.append((pid, reader))
    for pid, reader in running:
        with os.fdopen(reader) as lines:
            seen = [lines.readline() for _ in range(draw.randrange(8))]
            time.sleep(draw.random() * 0.005)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            seen += [line for line in lines if line.endswith("\\n")]
            midway += seen[-1:] == ["begin\\n"]
            done = [line.split() for line in seen if line != "begin\\n"]
            acknowledged.update(done)
            count += len(done)
snapshot = open_store(root).snapshot
# Newer ones may have been published and not yet acknowledged.
found = {name: [version.digest for version in versions] for name, versions in snapshot.index.modules.items()}
lost = {name: digest for name, digest in acknowledged.items() if digest not in found.get(name, ())}
print(json.dumps([count, lost, dict(snapshot.problems), midway]))
"""


def run(location: str, rounds: int, when: str) -> tuple[int, dict[str, str], dict[str, str], int]:
    """Return the number of acknowledged changes, the lost ones, unreadable content, and the kills during a change."""
    arguments = [location, str(rounds), str(WRITERS), when]
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    acknowledged, lost, problems, midway = json.loads(done.stdout)
    return acknowledged, lost, problems, midway


def test_killed_writers_lose_no_changes(backend: Backend) -> None:
    """Catches a lost or partially written module after its acknowledgement, and a lock that outlives its holder."""
    acknowledged, lost, problems, midway = run(backend.location, ROUNDS, "late")
    assert (lost, problems) == ({}, {})
    assert acknowledged > ROUNDS
    assert midway > 0, "no kill hit a change"
    survivor = registry(backend.open())
    assert all(info.problem is None and info.width == 8 for info in survivor.list().data)
    survivor.register("after", base={"post_block": {1: [1.0] * 8}})
    assert backend.leftovers() == []


def test_early_acknowledgement_is_detected(backend: Backend) -> None:
    """Negative control: the test detects modules that are acknowledged before they are stored."""
    # Some kills hit no change that is underway, so there are as many as above.
    _, lost, _, _ = run(backend.location, ROUNDS, "early")
    assert lost

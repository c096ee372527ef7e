# SPDX-License-Identifier: Apache-2.0
"""Tests of registry writers that are killed at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.registry.modules import registry
from tests.repo.tree import ROOT
from vllm_steer.registry.directory import DirectoryStore

ROUNDS, WRITERS = 50, 2
# A process of its own with one thread, which may fork: the writers need not load anything. Each writes down a module's
# name and digest when its change has returned or, for the control, before it is made.
HARNESS = """
import json, os, random, signal, sys, time
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.directory import DirectoryStore
from vllm_steer.registry.module import parse_module
from vllm_steer.registry.index import RegistryLimits
root, rounds, writers, early = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "early"
draw = random.Random(0)

def write(number, pipe):
    store = DirectoryStore(root)
    for i in range(10_000):
        name = f"m{number % writers}.{i % 4}"
        module = parse_module({"base": {"post_block": {1: [float(number + 1), float(i)] * 4}}})
        line = f"{name} {module.digest}\\n".encode()
        if early:
            os.write(pipe, line)
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
            write(round_ * writers + i, pipe)
        os.close(pipe)
        running.append((pid, reader))
    for pid, reader in running:
        with os.fdopen(reader) as lines:
            for _ in range(draw.randrange(4)):
                acknowledged.update([lines.readline().split()])
                count += 1
            time.sleep(draw.random() * 0.005)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            acknowledged.update(line.split() for line in lines if line.endswith("\\n"))
    midway += any(name.startswith(".tmp-") for folder in (root, root + "/objects") for name in os.listdir(folder))
snapshot = DirectoryStore(root).snapshot
# Newer ones may have been published and not yet acknowledged.
found = {name: [version.digest for version in versions] for name, versions in snapshot.index.modules.items()}
lost = {name: digest for name, digest in acknowledged.items() if digest not in found.get(name, ())}
print(json.dumps([count, lost, dict(snapshot.problems), midway]))
"""


def run(root: Path, rounds: int, when: str) -> tuple[int, dict[str, str], dict[str, str], int]:
    """Return the number of acknowledged changes, the lost ones, unreadable content, and the kills during a write."""
    arguments = [str(root), str(rounds), str(WRITERS), when]
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    acknowledged, lost, problems, midway = json.loads(done.stdout)
    return acknowledged, lost, problems, midway


def test_killed_writers_lose_no_changes(tmp_path: Path) -> None:
    """Catches a lost or partially written module after its acknowledgement, and a lock that outlives its holder."""
    acknowledged, lost, problems, midway = run(tmp_path / "registry", ROUNDS, "late")
    assert (lost, problems) == ({}, {})
    assert acknowledged > ROUNDS
    assert midway > 0, "no kill met a writer at work"
    survivor = registry(DirectoryStore(tmp_path / "registry"))
    assert all(info.problem is None and info.width == 8 for info in survivor.list().data)
    survivor.register("after", base={"post_block": {1: [1.0] * 8}})
    left = [path.name for path in (tmp_path / "registry").rglob("*") if path.name.startswith(".tmp-")]
    assert left == []


def test_early_acknowledgement_is_detected(tmp_path: Path) -> None:
    """Negative control: the test detects modules that are acknowledged before they are stored."""
    _, lost, _, _ = run(tmp_path / "registry", 10, "early")
    assert lost

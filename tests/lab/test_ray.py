# SPDX-License-Identifier: Apache-2.0
"""Harvests and dose studies on a Ray cluster: a node that dies, resumption with and without Ray, and lost engines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.lab.test_dose import READOUT, directions
from tests.tiny import VOCAB, llm_settings, register_class
from vllm_steer import open_captures
from vllm_steer.lab import ProbeScore, RayEngines, dose, dose_study, harvest, ray_engines, shards, text_rows
from vllm_steer.lab.samples import SampleFile

RANDOM = np.random.default_rng(7)
TEXTS = [{"text": RANDOM.integers(0, VOCAB, RANDOM.integers(2, 20)).tolist(), "tag": f"t{i}"} for i in range(400)]
SITES: dict[str, Any] = {"layers": [1, 3]}
DOOMED, BATCH = "VLLM_STEER_TEST_DOOMED", 8
"""Environment variable with the node to kill, and the file that says that it can be."""


class SmallEngine(ray_engines.Engine):
    """An engine with small batches. On the doomed node it stops for ever between two files of a shard."""

    def start(self, model: str, options: dict[str, Any]) -> None:
        register_class("LlamaForCausalLM")
        text_rows._MOST_TEXTS = BATCH
        write, (doomed, file) = shards._write, os.environ[DOOMED].split(":")
        Path(file).with_name(f"process-{os.getpid()}").touch()
        on_doomed, written = ray.get_runtime_context().get_node_id() == doomed, []

        def held(captured: Any, shard: Any) -> None:
            if on_doomed and written:
                Path(file).touch()
                time.sleep(1000)
            while not on_doomed and not Path(file).exists():
                time.sleep(0.05)
            write(captured, shard)
            written.append(captured)

        shards._write = held
        super().start(model, options)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=node)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    ray.shutdown()
    found.shutdown()
    running = [int(path.name.split("-")[1]) for path in tmp_path.glob("process-*")]
    assert len(running) == 2
    end = time.monotonic() + 30
    while any(map(is_alive, running)):
        assert time.monotonic() < end, "an engine's process stays"
        time.sleep(0.1)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def contents(root: Path) -> list[Any]:
    """Return number, tag, tokens and rows of each stored text, in order."""
    requests = sorted(open_captures(root), key=lambda request: int(request.request_id))
    sites = [("post_block", 1), ("post_block", 3)]
    assert all(list(each.sites) == sites and each.run == "harvest" for each in requests)
    return [
        (int(each.request_id), each.tag, each.token_ids(*sites[0]).tolist(), *(each.numpy(*site) for site in sites))
        for each in requests
    ]


def check(found: list[Any], wanted: list[Any]) -> None:
    assert [each[:3] for each in found] == [each[:3] for each in wanted], "lost, doubled or another text"
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine[3:], other[3:], rtol=1e-3, atol=1e-3)


def check_dose(llm: Any, engines: RayEngines, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a study that is interrupted without Ray, then with it, ends like one that is not interrupted."""
    prompts, add = [text["text"] for text in TEXTS if len(text["text"]) > 4][:8], SampleFile.add
    given = {"score": ProbeScore(READOUT), "doses": [0.5, 1.0], "controls": 3, "max_tokens": 5}
    whole = dose(llm, directions(0, 2), prompts, **given)
    seen: list[int] = []

    def interrupted(file: SampleFile, samples: Any) -> None:
        add(file, samples)
        seen.append(len(samples))
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(SampleFile, "add", interrupted)
    monkeypatch.setattr(dose_study, "_QUEUE", 5)
    with pytest.raises(KeyboardInterrupt):
        dose(llm, directions(0, 2), prompts, **given, out=path)
    seen.clear()
    with pytest.raises(KeyboardInterrupt):
        dose(engines, directions(0, 2), prompts, **given, out=path)
    assert 0 < max(seen) < 5, "the texts were not divided among the engines"
    monkeypatch.setattr(SampleFile, "add", add)
    found = dose(engines, directions(0, 2), prompts, **given, out=path)
    samples = [sorted(each.samples, key=lambda sample: sample.key) for each in (found, whole)]
    assert len(path.read_text().splitlines()) == 1 + len(whole.samples) == 1 + len(samples[0])
    for mine, other in zip(*samples, strict=True):
        assert (mine.key, mine.tokens, mine.repetition) == (other.key, other.tokens, other.repetition)
        np.testing.assert_allclose((mine.score, mine.loss), (other.score, other.loss), rtol=1e-2, atol=1e-2)
    assert found.study == whole.study and found.chosen == whole.chosen
    assert [each.kind for each in found.held_out] == [each.kind for each in whole.held_out]
    assert dose(llm, directions(0, 2), prompts, **given, out=path).verdict == found.verdict


def test_a_node_dies(llm: Any, folder: Path, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows that a node takes with it, stores twice or leaves half, and a run that goes on only where it began.

    The harvest begins without Ray, loses a node with one of its two engines, and ends without Ray.
    """
    whole = harvest(llm, TEXTS, tmp_path / "whole", **SITES)
    wanted = contents(tmp_path / "whole")
    assert [each[0] for each in wanted] == list(range(len(TEXTS)))
    out, ready = tmp_path / "out", tmp_path / "ready"
    with monkeypatch.context() as patch:
        patch.setattr(text_rows, "_MOST_TEXTS", BATCH)
        rows_of, calls = text_rows.rows_of_prompt, []

        def interrupted(output: Any) -> Any:
            calls.append(1)
            if len(calls) == 20:
                raise KeyboardInterrupt
            return rows_of(output)

        patch.setattr(text_rows, "rows_of_prompt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            harvest(llm, TEXTS, out, **SITES)
    before = len(contents(out))
    assert 0 < before < 30
    doomed = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    monkeypatch.setenv(DOOMED, f"{doomed.node_id}:{ready}")
    monkeypatch.setattr(ray_engines, "Engine", SmallEngine)

    def kill() -> None:
        while not ready.exists():
            time.sleep(0.05)
        cluster.remove_node(doomed, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with RayEngines(str(folder), **llm_settings()) as engines:
        assert engines.count == 2
        found = harvest(engines, TEXTS, out, **SITES)
        check_dose(llm, engines, tmp_path / "dose.jsonl", monkeypatch)
    killer.join(1)
    assert not killer.is_alive(), "the node was not killed"
    assert found == whole, "other settings or counts than without Ray"
    check(contents(out), wanted)
    assert not list(out.glob(".*")), "incomplete files stay"
    files = sorted(out.glob("*.arrows"))
    assert len(files) > len(TEXTS) / 30
    files[5].unlink()
    assert len(contents(out)) < len(TEXTS)
    assert harvest(llm, TEXTS, out, **SITES) == whole
    check(contents(out), wanted)

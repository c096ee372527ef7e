# SPDX-License-Identifier: Apache-2.0
"""Assignment of tasks to engines, and shards of engines that were thought lost; without engines or Ray."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_steer import SteeringError
from vllm_steer.lab import shards
from vllm_steer.lab.ray_engines import ATTEMPTS, RayEngines, room_for


class ActorError(Exception):
    pass


class LostError(Exception):
    pass


class TaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class FakeRay:
    """Runs each call when its result is awaited, last call first; ``before(name, item)`` can raise instead."""

    exceptions = SimpleNamespace(RayActorError=ActorError, ObjectLostError=LostError, RayTaskError=TaskError)

    def __init__(self, before: Callable[[str, Any], None]) -> None:
        self.before = before
        self.killed: list[Any] = []
        self.engines = 0

    is_initialized = staticmethod(lambda: True)
    nodes = staticmethod(lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": True, "Resources": {"CPU": 5}}])
    put = staticmethod(lambda value: value)

    def remote(self, cls: type) -> Any:
        def create() -> Any:
            self.engines += 1

            def call(name: str, result: Callable[..., Any]) -> Any:
                return SimpleNamespace(remote=lambda *arguments: Call(name, arguments, result))

            return SimpleNamespace(
                start=call("start", lambda *arguments: None),
                run=call("run", lambda shared, item: shared[0]("llm", item)),
                __ray_terminate__=call("stop", lambda: None),
            )

        return SimpleNamespace(options=lambda **given: SimpleNamespace(remote=create))

    def wait(self, calls: list[Any], num_returns: int = 1, timeout: float | None = None) -> Any:
        return calls[-num_returns:], calls[:-num_returns]

    def get(self, call: Any) -> Any:
        self.before(call.name, call.arguments[-1])
        try:
            return call.result(*call.arguments)
        except Exception as error:
            raise TaskError(error) from error

    def kill(self, engine: Any) -> None:
        self.killed.append(engine)


class Call:
    def __init__(self, name: str, arguments: tuple[Any, ...], result: Callable[..., Any]) -> None:
        self.name, self.arguments, self.result = name, arguments, result


def engines(monkeypatch: pytest.MonkeyPatch, before: Callable[[str, Any], None]) -> tuple[RayEngines, FakeRay]:
    fake = FakeRay(before)
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    return RayEngines("m"), fake


def square(llm: Any, item: int) -> int:
    return item * item


def test_items_of_lost_engines_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an item that is lost with its engine or its result, runs twice, or has another item's result."""
    losses = {("run", 3): [ActorError(), LostError()], ("run", 0): [ActorError()]}

    def before(name: str, item: Any) -> None:
        if left := name == "run" and losses.get((name, item)):
            raise left.pop()

    pool, fake = engines(monkeypatch, before)
    assert pool.count == 3
    found = list(pool.map(square, range(9)))
    assert sorted(found) == [(item, item * item) for item in range(9)]
    assert len(fake.killed) == 3 and fake.engines == 6
    assert pool.call(square, 5) == 25
    assert fake.engines == 6, "an engine was started though others were idle"
    pool.close()
    assert len(fake.killed) == 6


def test_what_cannot_succeed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches endless starts of engines, a shard that kills one node after the other, and hidden causes."""
    calls: list[str] = []

    def lost(name: str, item: Any) -> None:
        calls.append(name)
        if name == failing and (name == "start" or item == 1):
            raise ActorError("out of memory")

    failing = "run"
    pool, _ = engines(monkeypatch, lost)
    with pytest.raises(SteeringError, match="a task lost too many engines; the last one: out of memory"):
        list(pool.map(square, [1, 2]))
    failing, calls[:] = "start", []
    pool, _ = engines(monkeypatch, lost)
    with pytest.raises(SteeringError, match="too many engines were lost; the last one: out of memory"):
        list(pool.map(square, [1]))
    assert len(calls) == ATTEMPTS * pool.count + 1

    def refusing(llm: Any, item: Any) -> Any:
        raise SteeringError("texts", "is too long") if item else ZeroDivisionError

    pool, fake = engines(monkeypatch, lambda name, item: None)
    with pytest.raises(SteeringError, match=r"^texts: is too long"):
        list(pool.map(refusing, [1]))
    with pytest.raises(TaskError):
        pool.call(refusing, 0)
    assert sorted(pool.map(square, [2, 3])) == [(2, 4), (3, 9)] and not fake.killed, "an error ended an engine"

    def missing(name: str, item: Any) -> None:
        raise TaskError(OSError("no such model"))

    pool, _ = engines(monkeypatch, missing)
    with pytest.raises(SteeringError, match="ray: an engine of m cannot be started: no such model"):
        list(pool.map(square, [1]))


def test_a_relative_folder_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder that other processes do not find, and a name with which a run without Ray does not go on."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    starts: list[Any] = []
    monkeypatch.setattr(FakeRay, "get", lambda self, call: starts.append(call.arguments))
    monkeypatch.setitem(sys.modules, "ray", FakeRay(lambda name, item: None))  # type: ignore[arg-type]
    list(RayEngines("model", dtype="float32").map(square, [1]))
    assert starts[0] == (str(tmp_path / "model"), {"served_model_name": "model", "dtype": "float32"})


def test_engines_fit_the_nodes() -> None:
    """Catches an engine over two nodes, several on one node without GPUs, and a cluster without room that waits."""
    gpus = [{"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 6.0}, {"CPU": 4.0}]
    assert room_for(gpus, 2, 2) == ("GPU", 4.0, 3)
    assert room_for([{"CPU": 8.0}, {"CPU": 8.0}, {"memory": 1.0}], 1) == ("CPU", 8.0, 2)
    with pytest.raises(SteeringError, match="no node of the cluster has 16 GPUs"):
        room_for(gpus, 16)


def test_a_lost_engine_cannot_write_later(tmp_path: Path) -> None:
    """Catches a file that an engine adds after its run has ended, beside the same texts of the next run."""
    parts = tmp_path / ".shards-0123abcd"
    parts.mkdir()
    shard = shards._Shard(parts, 10**18, None, range(4))
    assert shard.file(2).name == "sharded-20010909t014640-000000002-0123abcd.arrows"
    assert shard.file(2) == shard.file(2) < shard.file(3)
    (parts / "half").touch()
    creating = threading.Event()

    def create() -> None:
        while not creating.is_set():
            try:
                (parts / "more").touch()
            except OSError:
                return

    thread = threading.Thread(target=create)
    thread.start()
    shards.remove_parts(tmp_path)
    creating.set()
    thread.join()
    assert not list(tmp_path.iterdir())
    captured: Any = SimpleNamespace(submission=0)
    with pytest.raises(SteeringError, match=r"out: .* cannot be written on .*: No such file.*All nodes must share"):
        shards._write([captured], shard)
    assert not list(tmp_path.iterdir())


def test_without_ray_the_install_line_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError where the extra is missing."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SteeringError, match=r'ray: the package ray is not installed; run `pip install "\.\[ray\]"`'):
        RayEngines("m")

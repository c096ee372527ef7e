# SPDX-License-Identifier: Apache-2.0
"""Engines on the nodes of a Ray cluster, which take tasks one by one."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from vllm_steer.errors import SteeringError, install_hint
from vllm_steer.request.scalars import read_integer

Item = TypeVar("Item")
Result = TypeVar("Result")
ATTEMPTS = 5
"""Engines that a task may lose, and starts per engine that may be lost in a row."""
_PREFIXES = ("VLLM_", "HF_", "HUGGING_FACE_", "NCCL_", "OMP_", "NUMBA_", "TORCH", "TOKENIZERS_")
_OF_A_NODE = ("VLLM_HOST_IP", "VLLM_PORT")
_STOP_SECONDS = 30.0


class Engine:
    """An engine in a process of its own on a node."""

    def start(self, model: str, options: dict[str, Any]) -> None:
        """Load the model. Ray reports an error of a constructor like a lost node, so this is a method of its own."""
        from vllm_steer import LLM

        self._llm = LLM(model, enable_steering=True, **options)
        self._key: Any = None

    def run(self, shared: list[Any], item: Any) -> Any:
        """Run one item of a task, which is fetched with its first item."""
        import ray

        if shared != self._key:
            self._key, self._task = shared, ray.get(shared[0])
        return self._task(self._llm, item)


class RayEngines:
    """Engines of one model on a Ray cluster, which `harvest` and `dose` take in the place of an `LLM`.

    The cluster is that of ``RAY_ADDRESS``, a running one on this machine, or this machine alone. There is one engine
    for as many GPUs as the model is split over, or one per node in a cluster without GPUs. Engines start in the
    background. The task of an engine that is lost, for instance with its node, runs again on another one, and a new
    engine starts as soon as the cluster has room. Environment variables of vLLM, Hugging Face, NCCL and PyTorch are
    those of this process.
    """

    def __init__(self, model: str, *, engines: int | None = None, **options: Any) -> None:
        """Connect to the cluster.

        Args:
            model: Name of the model, or a folder that all nodes have.
            engines: Number of engines; as many as the cluster has room for by default.
            **options: Arguments of `LLM`.

        Raises:
            SteeringError: The package ray is missing, or the cluster cannot be reached or has no room for an engine.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise SteeringError("ray", f"the package ray is not installed; {install_hint('ray')}") from None
        self._ray = ray
        self._model = str(Path(model).resolve()) if Path(model).is_dir() else model
        self._options = {"served_model_name": model, **options}
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise SteeringError("ray", f"the cluster cannot be reached: {error}") from None
        world = (options.get(f"{name}_parallel_size") or 1 for name in ("tensor", "pipeline", "data"))
        kind, need, room = room_for([each["Resources"] for each in ray.nodes() if each["Alive"]], *world)
        self.count = room if engines is None else read_integer(engines, 1, 10_000, "engines")
        """Number of engines."""
        variables = {name: os.environ[name] for name in os.environ if name.startswith(_PREFIXES)}
        self._actor = ray.remote(Engine).options(
            **{f"num_{kind.lower()}s": need},
            runtime_env={"env_vars": {name: text for name, text in variables.items() if name not in _OF_A_NODE}},
        )
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []
        self._shared: tuple[Any, list[Any]] | None = None
        self._lost = 0

    def map(self, task: Callable[[Any, Item], Result], items: Iterable[Item]) -> Generator[tuple[Item, Result]]:
        """Call ``task(llm, item)`` for each item on some engine; yield items and results as they come.

        Raises:
            SteeringError: A task raises it, an engine cannot be started, or an item loses too many engines.
        """
        ray, lost = self._ray, (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError)
        if self._shared is None or self._shared[0] is not task:
            self._shared = task, [ray.put(task)]
        shared = self._shared[1]
        waiting = deque((item, 1) for item in items)
        running: dict[Any, tuple[Any, Item, int]] = {}
        try:
            while waiting or running:
                if waiting:
                    self._start(self.count - len(running) - len(self._idle) - len(self._starting))
                while waiting and self._idle:
                    engine, (item, attempt) = self._idle.pop(), waiting.popleft()
                    running[engine.run.remote(shared, item)] = engine, item, attempt
                (ended,), _ = ray.wait([*running, *self._starting], num_returns=1)
                job = running.pop(ended, None)
                engine = self._starting.pop(ended) if job is None else job[0]
                try:
                    result = ray.get(ended)
                except lost as error:
                    ray.kill(engine)  # if only its connection was lost
                    if job is None:
                        self._lost += 1
                    else:
                        waiting.appendleft((job[1], job[2] + 1))
                    if self._lost > ATTEMPTS * self.count or (job is not None and job[2] == ATTEMPTS):
                        problem = "too many engines were lost" if job is None else "a task lost too many engines"
                        raise SteeringError("ray", f"{problem}; the last one: {error}") from None
                    continue
                except ray.exceptions.RayTaskError as error:
                    if job is None:
                        problem = f"an engine of {self._model} cannot be started: {error.cause}"
                        raise SteeringError("ray", problem) from error
                    self._idle.append(engine)
                    raise (error.cause if isinstance(error.cause, SteeringError) else error) from None
                self._idle.append(engine)
                if job is None:
                    self._lost = 0
                else:
                    yield job[1], result
        finally:
            for engine, *_ in running.values():  # after an error
                ray.kill(engine)

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return ``function(llm, *arguments)`` of some engine; see `map`."""
        ((_, result),) = self.map(partial(_call, function), [arguments])
        return result

    def close(self) -> None:
        """End the engines, and the connection to the cluster unless it was there before. Idempotent."""
        ending = [engine.__ray_terminate__.remote() for engine in self._idle]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=_STOP_SECONDS)
        for engine in (*self._idle, *self._starting.values()):
            self._ray.kill(engine)
        self._idle, self._starting, self._shared = [], {}, None
        if self._connected:
            self._ray.shutdown()
            self._connected = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, number: int) -> None:
        for _ in range(number):
            engine = self._actor.remote()
            self._starting[engine.start.remote(self._model, self._options)] = engine


def room_for(nodes: list[dict[str, float]], *world: int) -> tuple[str, float, int]:
    """Return the resource that engines need, how much of it each needs, and the number of engines with room.

    Args:
        nodes: Resources of each node.
        world: Numbers of ranks, whose product is the number of GPUs of an engine.
    """
    if any(node.get("GPU") for node in nodes):
        kind, need = "GPU", 1.0
        for ranks in world:
            need *= ranks
    else:
        kind, need = "CPU", min((node["CPU"] for node in nodes if node.get("CPU")), default=1.0)
    room = sum(int(node.get(kind, 0) // need) for node in nodes)
    if not room:
        raise SteeringError("ray", f"no node of the cluster has {need:g} {kind}s, which an engine needs")
    return kind, need, room


def _call(function: Callable[..., Result], llm: Any, arguments: Iterable[Any]) -> Result:
    return function(llm, *arguments)

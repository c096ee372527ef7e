# SPDX-License-Identifier: Apache-2.0
"""Statistics of the scheduler, step by step without an engine, and what remains in vLLM's statistics."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine import scheduler_harness
from tests.tiny import HIDDEN, code_of, direction, save_tiny_llama
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.engine.model_output import attach_stats
from vllm_steer.metrics.engine_stats import STATS_KEY, EngineStats, WorkerStats, pop_stats
from vllm_steer.points import points_on

ROW_BYTES = 4 * HIDDEN
STEER = [{"steering_vectors": {"post_block": {1: direction(seed)}}} for seed in range(3)]
CAPTURE = {"capture": {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}}
EVERYWHERE = dict.fromkeys(points_on(()), "all")
WHOLE_STREAM = {"capture": {"memory": {"hooks": EVERYWHERE, "positions": "all"}}}


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"))
    return scheduler_harness.config(folder, sequences=8, max_rows=2, max_vectors=2, capture_mib=1, queue_timeout=30)


class Engine:
    """Scheduler with a model that returns at once."""

    def __init__(self, vllm_config: Any, *, log_stats: bool = True) -> None:
        self.scheduler = scheduler_harness.make(vllm_config, blocks=200, log_stats=log_stats)
        self.clock = 0.0
        self.scheduler.steering_admission._now = lambda: self.clock
        self.made = 0

    def add(self, *, tokens: int = 4, prompt: int = 4, **fields: Any) -> str:
        self.made += 1
        name = f"request-{self.made}"
        self.scheduler.add_request(scheduler_harness.request(name, list(range(2, 2 + prompt)), tokens, **fields))
        return name

    def step(self, rows: tuple[StepRows, ...] = (), worker: WorkerStats | None = None) -> Any:
        """Run one step and return vLLM's statistics as they leave the engine's process."""
        scheduled = self.scheduler.schedule()
        output = attach_stats(scheduler_harness.model_output(self.scheduler, scheduled, rows), worker)
        outputs = self.scheduler.update_from_output(scheduled, output)
        found = [each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None]
        assert len(found) <= 1
        return found[0] if found else None

    def step_stats(self, *args: Any, **kwargs: Any) -> EngineStats | None:
        return pop_stats(self.step(*args, **kwargs))


@pytest.fixture
def engine(vllm_config: Any) -> Engine:
    return Engine(vllm_config)


def test_counts_waiting_requests_by_reason(engine: Engine) -> None:
    """Catches a constant reason, a reason that remains after the request ran, and miscounted tables."""
    for fields in STEER:
        engine.add(**fields)
    engine.add(**STEER[0])
    engine.add()
    stats = engine.step_stats()
    assert stats is not None
    usage = stats.usage
    assert usage is not None
    assert (usage.tables, usage.admitted, usage.waiting) == ((2, 2, 2, 0), 2, {"rows": 1, "turn": 1})
    while engine.scheduler.requests:
        later = engine.step_stats()
        usage = usage if later is None or later.usage is None else later.usage
    assert (usage.tables, usage.admitted, usage.waiting) == ((0, 0, 0, 0), 0, {})


@pytest.mark.parametrize(
    ("sizes", "reason"), [({"max_vectors": 1}, "vectors"), ({"max_instructions": 1}, "instructions")]
)
def test_reason_names_the_full_table(vllm_config: Any, sizes: dict[str, int], reason: str) -> None:
    """Catches a shortage of vectors or instructions reported as a shortage of rows."""
    old = vllm_config.additional_config["steering"]
    vllm_config.additional_config["steering"] = {**old, **sizes}
    try:
        small = Engine(vllm_config)
    finally:
        vllm_config.additional_config["steering"] = old
    small.add(**STEER[0])
    small.add(**STEER[1])
    stats = small.step_stats()
    assert stats is not None and stats.usage is not None and stats.usage.waiting == {reason: 1}


def test_capture_budget_is_a_reason_to_wait(engine: Engine) -> None:
    """Catches (1) the capture budget counted as a table and (2) reserved rows attributed to the wrong request."""
    rows_of_one = 12 * (4 + 100 - 1)
    most = (1 << 20) // ROW_BYTES // rows_of_one
    for _ in range(most + 1):
        engine.add(tokens=100, **WHOLE_STREAM)
    stats = engine.step_stats()
    assert stats is not None and stats.usage is not None
    assert stats.usage.reserved_rows == most * rows_of_one
    assert stats.usage.waiting == {"capture": 1}


def test_counts_each_timeout_once(engine: Engine) -> None:
    """Catches a count that is repeated in every step or lost."""
    for fields in STEER:
        engine.add(tokens=20, **fields)
    engine.step_stats()
    engine.clock = 31.0
    counts = [each.timed_out for each in (engine.step_stats() for _ in range(3)) if each is not None]
    assert counts == [1, 0, 0]


def test_counts_captured_rows(engine: Engine) -> None:
    """Catches rows counted per request or step, and a buffer size that resets in steps without worker statistics."""
    name = engine.add(tokens=2, **CAPTURE)
    entries = RowIndex((name,), ((code_of("post_block", 1),),))

    def rows(start: int, count: int) -> tuple[StepRows, ...]:
        data = np.zeros((count, ROW_BYTES), np.uint8)
        return (StepRows(entries, np.array([start]), np.array([count]), data),)

    first = engine.step_stats(rows(0, 4), WorkerStats(0.25, 4096))
    second = engine.step_stats(rows(4, 1))
    assert first is not None and second is not None
    assert (first.captured_rows, first.captured_bytes) == (4, 4 * ROW_BYTES)
    assert (second.captured_rows, second.captured_bytes) == (1, ROW_BYTES)
    assert (first.worker_seconds, second.worker_seconds) == (0.25, None)
    assert first.scheduler_seconds > 0
    # The buffers still exist in a step for which the worker sends no statistics.
    assert (first.staging_bytes, second.staging_bytes) == (4096, 4096)


def test_plain_requests_send_no_statistics(engine: Engine) -> None:
    """Catches statistics sent with every step while no request is steered."""
    engine.add(tokens=3)
    while engine.scheduler.requests:
        assert engine.step().kv_connector_stats is None


def test_disable_log_stats_sends_no_statistics(vllm_config: Any) -> None:
    """Catches statistics that are collected although vLLM's are disabled."""
    silent = Engine(vllm_config, log_stats=False)
    silent.add(**STEER[0])
    assert silent.step() is None


def test_keeps_statistics_of_the_kv_connector(engine: Engine) -> None:
    """Catches a connector's statistics that ours replace, change or remain part of."""
    engine.add(**STEER[0])
    stats = engine.step()
    theirs = {"transfers": 3}
    stats.kv_connector_stats = {**theirs, **stats.kv_connector_stats}
    assert STATS_KEY in stats.kv_connector_stats
    assert pop_stats(stats) is not None
    assert stats.kv_connector_stats == theirs
    assert pop_stats(stats) is None


def test_statistics_survive_vllms_serialization(engine: Engine) -> None:
    """Catches statistics that can only be read in the same process."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    engine.add(**STEER[0])
    stats = engine.step()
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    assert pop_stats(received) == pop_stats(stats) is not None
    assert received.kv_connector_stats is None


@pytest.fixture
def manager(vllm_config: Any) -> Any:
    """Return vLLM's stat logger manager with our logger installed."""
    from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerManager

    from vllm_steer.plugin.entry_point import wrap_front_end

    wrap_front_end()
    return StatLoggerManager(vllm_config, engine_idxs=[0], custom_stat_loggers=[LoggingStatLogger])


def test_vllms_loggers_never_see_our_statistics(engine: Engine, manager: Any) -> None:
    """Catches a logger behind vLLM's, which would parse our statistics as a KV connector's and fail."""
    engine.add(**STEER[0])
    manager.record(engine.step(), None, engine_idx=0)
    unseen = engine.step()
    with pytest.raises((AttributeError, AssertionError)):
        for logger in manager.stat_loggers[1:]:
            logger.record(unseen, None, engine_idx=0)


def test_no_stat_logger_without_steering(vllm_config: Any, manager: Any) -> None:
    """Catches a stock engine that runs our code."""
    stock = type("Stock", (), {"__getattr__": lambda _, name: getattr(vllm_config, name)})()
    stock.additional_config = {}
    assert type(manager.stat_loggers[0]).__module__.startswith("vllm_steer")
    assert not [each for each in type(manager)(stock).stat_loggers if type(each).__module__.startswith("vllm_steer")]


def test_size_does_not_depend_on_the_number_of_requests(engine: Engine) -> None:
    """Catches statistics that grow with the number of requests, since they are sent with every step."""
    for seed in (0, 1) * 3:
        engine.add(**STEER[seed])
    assert len(msgspec.msgpack.encode(engine.step().kv_connector_stats)) < 200

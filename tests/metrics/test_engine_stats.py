# SPDX-License-Identifier: Apache-2.0
"""The scheduler's numbers, step by step, without an engine: what is sent, and what is left of vLLM's statistics."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine import scheduler_harness
from tests.tiny import HIDDEN, code_of, direction, save_tiny_llama
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.engine.model_output import attach_stats
from vllm_steer.metrics.engine_stats import STATS_KEY, EngineStats, pop_stats
from vllm_steer.metrics.worker_stats import WorkerStats
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
    """A scheduler whose model answers at once."""

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
        """vLLM's statistics of one step, as they leave the engine's process."""
        scheduled = self.scheduler.schedule()
        output = attach_stats(scheduler_harness.model_output(self.scheduler, scheduled, rows), worker)
        outputs = self.scheduler.update_from_output(scheduled, output)
        found = [each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None]
        assert len(found) <= 1
        return found[0] if found else None

    def news(self, *args: Any, **kwargs: Any) -> EngineStats | None:
        return pop_stats(self.step(*args, **kwargs))


@pytest.fixture
def engine(vllm_config: Any) -> Engine:
    return Engine(vllm_config)


def test_what_waits_says_for_what(engine: Engine) -> None:
    """Catches a reason that is always the same, one that stays when the request has run, and a count of rows that
    forgets who holds them."""
    for fields in STEER:
        engine.add(**fields)
    engine.add(**STEER[0])
    engine.add()
    news = engine.news()
    assert news is not None
    books = news.usage
    assert books is not None
    assert (books.tables, books.admitted, books.waiting) == ((2, 2, 2), 2, {"rows": 1, "turn": 1})
    while engine.scheduler.requests:
        later = engine.news()
        books = books if later is None or later.usage is None else later.usage
    assert (books.tables, books.admitted, books.waiting) == ((0, 0, 0), 0, {})


@pytest.mark.parametrize(
    ("sizes", "reason"), [({"max_vectors": 1}, "vectors"), ({"max_instructions": 1}, "instructions")]
)
def test_other_tables_have_their_own_reasons(vllm_config: Any, sizes: dict[str, int], reason: str) -> None:
    """Catches a shortage that is reported as one of rows."""
    old = vllm_config.additional_config["steering"]
    vllm_config.additional_config["steering"] = {**old, **sizes}
    try:
        small = Engine(vllm_config)
    finally:
        vllm_config.additional_config["steering"] = old
    small.add(**STEER[0])
    small.add(**STEER[1])
    news = small.news()
    assert news is not None and news.usage is not None and news.usage.waiting == {reason: 1}


def test_captures_wait_for_their_bytes(engine: Engine) -> None:
    """Catches a capture budget that is mistaken for a table, and booked rows that are not those of the request."""
    rows_of_one = 12 * (4 + 100 - 1)
    most = (1 << 20) // ROW_BYTES // rows_of_one
    for _ in range(most + 1):
        engine.add(tokens=100, **WHOLE_STREAM)
    news = engine.news()
    assert news is not None and news.usage is not None
    assert news.usage.capture_rows == most * rows_of_one
    assert news.usage.waiting == {"capture": 1}


def test_a_time_out_is_counted_once(engine: Engine) -> None:
    """Catches a count that is repeated with every step, and one that gets lost."""
    for fields in STEER:
        engine.add(tokens=20, **fields)
    engine.news()
    engine.clock = 31.0
    counts = [each.timed_out for each in (engine.news() for _ in range(3)) if each is not None]
    assert counts == [1, 0, 0]


def test_rows_are_counted_as_they_come(engine: Engine) -> None:
    """Catches rows that are counted by request or by step, and buffers that are gone when nothing is said of them."""
    name = engine.add(tokens=2, **CAPTURE)
    entries = RowIndex((name,), ((code_of("post_block", 1),),))

    def rows(start: int, count: int) -> tuple[StepRows, ...]:
        data = np.zeros((count, ROW_BYTES), np.uint8)
        return (StepRows(entries, np.array([start]), np.array([count]), data),)

    first = engine.news(rows(0, 4), WorkerStats(0.25, 4096))
    second = engine.news(rows(4, 1))
    assert first is not None and second is not None
    assert (first.captured_rows, first.captured_bytes) == (4, 4 * ROW_BYTES)
    assert (second.captured_rows, second.captured_bytes) == (1, ROW_BYTES)
    assert (first.worker_seconds, second.worker_seconds) == (0.25, None)
    assert first.scheduler_seconds > 0
    # What the worker keeps does not go away because it had nothing to say.
    assert (first.staging_bytes, second.staging_bytes) == (4096, 4096)


def test_plain_requests_send_nothing(engine: Engine) -> None:
    """Catches numbers that travel with every step of an engine that nobody steers."""
    engine.add(tokens=3)
    while engine.scheduler.requests:
        assert engine.step().kv_connector_stats is None


def test_without_statistics_nothing_is_sent(vllm_config: Any) -> None:
    """Catches statistics that are made although they were switched off."""
    silent = Engine(vllm_config, log_stats=False)
    silent.add(**STEER[0])
    assert silent.step() is None


def test_a_connectors_own_numbers_are_left_to_it(engine: Engine) -> None:
    """Catches a connector's statistics that ours take the place of, change, or stay in when they should be out."""
    engine.add(**STEER[0])
    stats = engine.step()
    theirs = {"transfers": 3}
    stats.kv_connector_stats = {**theirs, **stats.kv_connector_stats}
    assert STATS_KEY in stats.kv_connector_stats
    assert pop_stats(stats) is not None
    assert stats.kv_connector_stats == theirs
    assert pop_stats(stats) is None


def test_the_numbers_survive_vllms_wire(engine: Engine) -> None:
    """Catches a form that only works within one process."""
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
    """What gives each step's numbers to vLLM's loggers and to ours."""
    from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerManager

    from vllm_steer.compat.plugin import wrap_front_end

    wrap_front_end()
    return StatLoggerManager(vllm_config, engine_idxs=[0], custom_stat_loggers=[LoggingStatLogger])


def test_vllms_loggers_never_see_our_numbers(engine: Engine, manager: Any) -> None:
    """Catches a logger behind vLLM's: they take what is in that field for a KV connector's, and fail."""
    engine.add(**STEER[0])
    manager.record(engine.step(), None, engine_idx=0)
    unseen = engine.step()
    with pytest.raises((AttributeError, AssertionError)):
        for logger in manager.stat_loggers[1:]:
            logger.record(unseen, None, engine_idx=0)


def test_without_steering_there_is_no_logger_of_ours(vllm_config: Any, manager: Any) -> None:
    """Catches a stock engine that runs our code."""
    stock = type("Stock", (), {"__getattr__": lambda _, name: getattr(vllm_config, name)})()
    stock.additional_config = {}
    assert type(manager.stat_loggers[0]).__module__.startswith("vllm_steer")
    assert not [each for each in type(manager)(stock).stat_loggers if type(each).__module__.startswith("vllm_steer")]


def test_a_report_is_small(engine: Engine) -> None:
    """Catches statistics that grow with the number of requests: they are sent with every step."""
    for seed in (0, 1) * 3:
        engine.add(**STEER[seed])
    assert len(msgspec.msgpack.encode(engine.step().kv_connector_stats)) < 200

# SPDX-License-Identifier: Apache-2.0
"""Tests of the figures, the log reader and the time limit of the server benchmark, without a server."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.serve import (
    Load,
    TimeUpError,
    client_options,
    make_module,
    make_ways,
    rounds_of,
    summarize,
    time_limit,
)
from benchmarks.server_process import read_cache


def cell(number: int, way: str, speed: float, cpu: float) -> dict[str, Any]:
    return {
        "round": number, "concurrency": 8, "way": way, "tokens_per_second": speed, "first_token_ms": 10.0,
        "token_ms": 2.0, "p99_between_tokens_ms": 0.0, "cpu_seconds": {"api server": cpu, "engine core": 1.0},
    }  # fmt: skip


def test_ratios_within_a_round() -> None:
    """Catches a ratio between cells of different rounds, rounds without stock vLLM, and CPU time per cell."""
    cells = [cell(0, "stock", 100, 1), cell(0, "idle", 90, 1.5), cell(1, "idle", 5, 9), cell(2, "stock", 200, 2),
             cell(2, "idle", 200, 2.25)]  # fmt: skip
    [figure] = summarize(cells, Load(1, 1, {8: 100}))
    assert figure["rounds"] == 2
    assert figure["tokens_per_second"] == [0.95, 0.9, 1.0]
    assert "p99_between_tokens_ms" not in figure  # stock vLLM's is zero
    assert figure["added_cpu_ms"] == {"api server": 3.75, "engine core": 0.0}


def test_ways_fit_the_module() -> None:
    """Catches probes that the requests name and the module does not have, and hooks at different layers."""
    ways, module = make_ways(8, 3), make_module(8, 3)
    reduce = ways["probes"]["capture"]["memory"]["reduce"]["probes"]
    assert reduce == [f"{module['name']}/{name}" for name in module["probes"]]
    assert list(module["base"]["post_block"]) == list(ways["vector"]["steering_vectors"]["post_block"]) == ["3"]
    assert ways["idle"] == ways["stock"] == {}


def test_cache_from_the_log() -> None:
    """Catches a token count that ends at its comma, and a figure invented for a log without one."""
    log = "INFO Available KV cache memory: 14.25 GiB\nINFO GPU KV cache size: 116,736 tokens, Maximum concurrency"
    assert read_cache(log) == {"cache_tokens": 116736, "cache_gib": 14.25}
    assert read_cache("no cache") == {}


def test_time_limit_reaches_through_exception_handlers() -> None:
    """Catches a limit that a handler of failed requests swallows, and a timer that outlives its context."""
    with pytest.raises(TimeUpError), time_limit(time.monotonic() + 0.05):
        try:
            time.sleep(30)
        except Exception:  # as the client does
            time.sleep(30)
    with time_limit(time.monotonic() + 0.05):
        pass
    time.sleep(0.1)


def test_rounds_cover_each_concurrency() -> None:
    """Catches an order in which a time limit leaves concurrencies without any cell."""
    load = Load(16, 8, {1: 16, 256: 1024, 32: 320})
    assert rounds_of(load, 2) == [(0, 256), (0, 32), (0, 1), (1, 256), (1, 32), (1, 1)]


def test_the_client_varies_lengths() -> None:
    """Catches a spread that the client does not get, and one given to loads without it."""
    options = client_options(Load(128, 96, {4: 40}, spread=0.5), 4, 7)
    given = dict(pairwise(options))
    assert given["--random-range-ratio"] == "0.5"
    assert (given["--random-input-len"], given["--random-output-len"]) == ("128", "96")
    assert (given["--num-prompts"], given["--max-concurrency"], given["--seed"]) == ("40", "4", "7")
    assert "--ignore-eos" in options
    assert client_options(Load(1, 1, {1: 1}), 1, 0)[options.index("--random-range-ratio") + 1] == "0.0"

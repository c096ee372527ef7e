# SPDX-License-Identifier: Apache-2.0
"""Environment variables that must be set before vLLM is imported, and the skip of GPU tests without a GPU."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.conformance import shard
from tests.conformance.namespaces import without_namespace
from tests.features import FeatureRecord
from tests.order import SecondsRecord, group_of, measured, slowest_first

# One engine in this very process, small caches, and no pinning of threads to cores that other engines of the same test
# run use as well. One thread each, which torch reads when it is first imported: models of this size are slower with
# more, since threads that wait for each other take the cores from the tests that run beside them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# numba, with which vLLM looks up n-grams, would otherwise set torch's number of threads to its own.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Some tests import models for GPUs, which load llvmlite. On a CPU, vLLM 0.32 then takes its library for a namespace
# when it looks for Triton kernels, and the next engine in the process does not start.
with suppress(ImportError):
    from llvmlite.binding import ffi

    type(ffi.lib).__getattr__ = without_namespace(type(ffi.lib).__getattr__)

# No test of this project is about time.
settings.register_profile("vllm-steer", deadline=None)
settings.load_profile("vllm-steer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hostile", type=int, metavar="N", help="draw N random requests for each operation in tests/server/hostile"
    )
    parser.addoption(
        "--record-seconds", action="store_true", help="write the seconds of each file to tests/seconds.json"
    )
    parser.addoption("--record-screenshots", action="store_true", help="write the studio's screenshots to docs/assets")
    parser.addoption("--features", type=Path, help="write how tests marked with a feature ended to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--features")
    if path is not None:
        config.pluginmanager.register(FeatureRecord(path))
    if config.getoption("--record-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondsRecord())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files that share a server to one worker, and begin with the slowest files."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedServers(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # by the number of tests
    return SharedServers(config, log)


_PRELOAD = os.environ.get("LD_PRELOAD")
# Spelt out, because the package is imported only after the environment is set.
SET_BY_FLAGS = ("VLLM_STEER_CAPTURE_CONSUMERS", "VLLM_STEER_CONTROLLER", "VLLM_STEER_REGISTRY")
SET_BY_MODELS = ("VLLM_USE_BREAKABLE_CUDAGRAPH",)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Undo what engines and flags in this process do to the environment of later tests.

    vLLM's CPU platform adds to LD_PRELOAD with every engine (``platforms/cpu.py``); a shell then complains on stderr,
    and after many engines Python cannot load torch. Flags that a test parses would give later tests its registry. Some
    models turn breakable graphs on for the whole process (``config/vllm.py``), after which no engine is compiled.
    """
    if _PRELOAD is None:
        os.environ.pop("LD_PRELOAD", None)
    else:
        os.environ["LD_PRELOAD"] = _PRELOAD
    for name in SET_BY_FLAGS + SET_BY_MODELS:
        os.environ.pop(name, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report which part of the architectures the conformance tests have proven."""
    reports = [report for category in terminalreporter.stats.values() for report in category]
    if any(getattr(report, "nodeid", "").startswith("tests/conformance/") for report in reports):
        terminalreporter.write_line(shard.describe())


def pytest_collection_finish() -> None:
    """Exclude the objects of imported modules from garbage collections, which take a tenth of the time otherwise."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report objects that remain at the end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch  # not above, where the environment is not yet set

    if hasattr(config, "workerinput"):
        items[:] = [items[index] for index in slowest_first([item.nodeid for item in items], measured())]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU; results of GPU runs are in benchmarks/results/")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)

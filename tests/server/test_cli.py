# SPDX-License-Identifier: Apache-2.0
"""The `vllm-steer` command."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from typing import Any

import pytest
import vllm
from typer.testing import CliRunner
from vllm.entrypoints.cli.serve import ServeSubcommand

import vllm_steer
from vllm_steer.cli.main import app
from vllm_steer.compat.version import TESTED_RANGE
from vllm_steer.config import SCHEDULER_CLS, WORKER_CLS
from vllm_steer.server.apply_flags import MIDDLEWARE


@pytest.fixture
def started_servers(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Return the parsed flags of each started server."""
    started: list[argparse.Namespace] = []
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(started.append))
    monkeypatch.setattr(sys, "argv", ["vllm-steer"])
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return started


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, words, catch_exceptions=False)


def test_serve_enables_steering(started_servers: list[argparse.Namespace]) -> None:
    """Catches flags lost on the way to vLLM, and a server that starts without steering."""
    words = ["some/model", "--steering-max-rows", "9", "--max-model-len=77", "-tp", "2", "--port", "8123"]
    assert invoke("serve", *words).exit_code == 0
    (args,) = started_servers
    assert (args.model_tag, args.max_model_len, args.tensor_parallel_size, args.port) == ("some/model", 77, 2, 8123)
    assert (args.worker_cls, args.scheduler_cls) == (WORKER_CLS, SCHEDULER_CLS)
    assert args.additional_config["steering"]["max_rows"] == 9
    assert args.middleware == [MIDDLEWARE]


def test_serve_needs_no_distribution_named_vllm(
    started_servers: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a dependence on the metadata of a distribution named vllm, which the CPU build does not have."""
    version = importlib.metadata.version

    def version_without_vllm(name: str) -> str:
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", version_without_vllm)
    assert invoke("serve", "some/model", "--enable-steering").exit_code == 0
    assert len(started_servers) == 1


@pytest.mark.parametrize(
    ("listed", "expected"), [("", "steering"), ("other", "other,steering"), ("steering", "steering")]
)
def test_serve_allows_the_plugin(
    listed: str, expected: str, started_servers: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches API server processes that do not load the plugin because VLLM_PLUGINS lists others."""
    monkeypatch.setenv("VLLM_PLUGINS", listed)
    invoke("serve", "some/model")
    assert os.environ["VLLM_PLUGINS"] == expected


def test_serve_reports_wrong_flags(started_servers: list[argparse.Namespace]) -> None:
    """Catches a traceback, or a server that starts despite a wrong flag."""
    result = invoke("serve", "some/model", "--steering-max-rows", "none")
    assert result.exit_code == 2
    assert "--steering-max-rows: must be an integer" in result.stderr
    assert started_servers == []


def test_version() -> None:
    """Catches a version number that is maintained in a second place."""
    result = invoke("version")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"vllm-steer {vllm_steer.__version__}",
        f"vLLM {vllm.__version__}",
        f"tested with vLLM {TESTED_RANGE}",
    ]


def test_help_does_not_load_vllm() -> None:
    """Catches an import that makes `vllm-steer --help` take seconds."""
    code = (
        "import sys; from vllm_steer.cli.main import app\n"
        "try: app(['--help'])\n"
        "finally: print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "serve" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"

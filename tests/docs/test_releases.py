# SPDX-License-Identifier: Apache-2.0
"""The guide on vLLM versions and images, and the flags of the Helm values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.docs.runner import blocks_of
from tests.repo.tree import ROOT, read
from tests.server_parser import server_parser
from vllm_steer.cli.main import app
from vllm_steer.compat.internals import LIST_ALL
from vllm_steer.compat.seam_digests import recorded
from vllm_steer.compat.version import OVERRIDE, TESTED, is_tested
from vllm_steer.settings import CONSUMERS_VARIABLE, REGISTRY_VARIABLE

GUIDE = "docs/guides/releases.md"
VALUES = "deploy/production-stack.yaml"


def test_table_has_the_tested_versions() -> None:
    """Catches a page that calls a version tested which the guard refuses, and a tested version that it omits."""
    rows = dict(re.findall(r"^\| (\d+\.\d+) \| (.*) \|$", read(GUIDE), re.MULTILINE))
    assert {version for version in rows if is_tested(version)} == {f"{major}.{minor}" for major, minor in TESTED}
    assert all("refused" in text for version, text in rows.items() if not is_tested(version))
    assert {f"{version}.0" for version in rows} == set(recorded())


def test_commands_of_the_guide_are_understood() -> None:
    """Catches a command or a variable that was renamed."""
    text = read(GUIDE)
    assert LIST_ALL in text and f"`{OVERRIDE}=1`" in text
    (version, *others) = [block.code.split("#")[0].split() for block in blocks_of(GUIDE, "bash")]
    assert version == [".venv/bin/vllm-steer", "version"]
    assert "tested with vLLM" in CliRunner().invoke(app, version[1:]).output
    makefile = read("Makefile")
    for words in others:
        exists = f"\n{words[1]}:" in makefile if words[0] == "make" else (ROOT / words[1]).is_file()
        assert exists, words


def test_helm_values_have_valid_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a renamed flag, a value that the server refuses, and a number that YAML does not pass as text."""
    from vllm_steer.plugin.entry_point import register

    register()
    for name in (CONSUMERS_VARIABLE, REGISTRY_VARIABLE):
        monkeypatch.setenv(name, "")
    (model,) = yaml.safe_load(read(VALUES))["servingEngineSpec"]["modelSpec"]
    words = model["vllmConfig"]["extraArgs"]
    assert all(isinstance(word, str) for word in words)
    parser = server_parser()

    def parse(words: list[str]) -> Any:
        return parser.parse_args([model["modelURL"], *(word.replace("/data", str(tmp_path)) for word in words)])

    assert parse(words).enable_steering
    with pytest.raises(SystemExit):
        parse([word.replace("registry", "registri") for word in words])

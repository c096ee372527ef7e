# SPDX-License-Identifier: Apache-2.0
"""The operator's guide: its commands are understood, its numbers are made, and what it quotes is said."""

from __future__ import annotations

import ast
import json
import logging.config
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.docs.markdown import blocks, tables
from tests.docs.runner import offline_blocks, run_python
from tests.repo.tree import ROOT, python_files, read
from tests.server_parser import server_parser
from vllm_steer import audit
from vllm_steer.cli import doctor
from vllm_steer.cli.main import app
from vllm_steer.server.auth.key_file import edit_keys, read_keys
from vllm_steer.server.auth.rights import RIGHT_DESCRIPTIONS
from vllm_steer.settings import CONSUMERS_VARIABLE, REGISTRY_VARIABLE

GUIDE = "docs/guides/operating.md"
PREFIX = ".venv/bin/"


def code_of(language: str) -> list[str]:
    return [block.code for block in blocks(read(GUIDE)) if block.language == language]


def commands() -> list[list[str]]:
    lines = "".join(code_of("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line.removeprefix(PREFIX)) for line in lines]


def test_every_block_is_looked_at() -> None:
    """Catches a block of a language of which these tests know nothing; a proxy's is the one that only it can read."""
    languages = {block.language for block in blocks(read(GUIDE))}
    assert languages == {"bash", "python", "yaml", "json", "nginx"}
    assert {words[0] for words in commands()} == {"vllm", "vllm-steer"}


@pytest.mark.slow
def test_the_python_blocks_run() -> None:
    """Catches an example that no longer runs, and metrics without values."""
    shown = run_python(offline_blocks(GUIDE), "values")
    prompt = len("Once upon a time")  # tokens of the demo model are fewer
    assert isinstance(shown, dict)
    rows, size = (shown[f"vllm_steer:captured_{what}"] for what in ("rows", "bytes"))
    width = json.loads(read("demo/model/config.json"))["hidden_size"]
    assert 0 < rows < prompt and size == rows * width * 4


def test_servers_flags_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a flag that neither vLLM nor this package has, and values that are refused."""
    from vllm_steer.plugin.entry_point import register

    register()
    monkeypatch.chdir(tmp_path)
    for name in (CONSUMERS_VARIABLE, REGISTRY_VARIABLE):
        monkeypatch.setenv(name, "")
    Path("calm.safetensors").touch()
    with edit_keys(Path("keys.json"), create=True) as write:
        write(())
    parser = server_parser()
    servers = [words[2:] for words in commands() if words[:2] == ["vllm", "serve"]]
    for words in servers:
        assert parser.parse_args(words).enable_steering
    assert len(servers) == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["demo/model", "--enable-steering", "--steering-registri", "x"])


def test_every_flag_that_is_named_is_one() -> None:
    """Catches a flag in the text that is not in the parser's help."""
    from vllm_steer.plugin.entry_point import register

    register()
    known = set(server_parser()._option_string_actions)
    named = set(re.findall(r"`(--[\w-]+)", read(GUIDE)))
    named -= {"--right", "--limit", "--json"}  # of the commands, which are run
    assert len(named) > 15
    assert named <= known


def test_the_other_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a sub-command or an option that is gone."""
    asked: list[Any] = []
    monkeypatch.setattr(doctor, "run", lambda *args, **kwargs: asked.append(args))
    monkeypatch.chdir(tmp_path)
    for words in (words for words in commands() if words[0] == "vllm-steer"):
        result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert len(asked) == 2
    assert [key.name for key in read_keys(tmp_path / "keys.json")] == ["carol", "deploy"]


def test_the_rights_are_those_of_the_code() -> None:
    """Catches a right that an operator gives for something else than it is."""
    (table,) = (t for t in tables(read(GUIDE)) if t[0][0] == "right")
    assert dict(table[1:]) == {right.value: text.replace("`", "") for right, text in RIGHT_DESCRIPTIONS.items()}


def test_prometheus_files_are_there() -> None:
    """Catches a file of rules or a dashboard under another name."""
    (settings,) = map(yaml.safe_load, code_of("yaml"))
    for name in (*settings["rule_files"], "observability/grafana.json"):
        assert (ROOT / name).is_file()
        assert name in read(GUIDE)


def test_the_logging_settings_keep_records_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a configuration that logging refuses, one that silences uvicorn's access log, and mixed records."""
    (text,) = code_of("json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "manager", logging.Manager(logging.root))
    monkeypatch.setattr(logging.Logger, "manager", logging.root.manager)
    monkeypatch.setattr(audit, "_logger", logging.getLogger(audit.LOGGER))
    logging.config.dictConfig(json.loads(text))
    audit.record("clear", before=1, after=2, name=None, digests=[])
    logging.getLogger("vllm.vllm_steer.registry").warning("something else")
    access = logging.getLogger("uvicorn.access")
    assert access.hasHandlers() and access.isEnabledFor(logging.INFO)
    written = Path("audit.jsonl").read_text().splitlines()
    for handler in logging.getLogger(audit.LOGGER).handlers:
        handler.close()
    (line,) = written
    assert json.loads(line)["epoch_after"] == 2


def sentences() -> str:
    """All strings of the package, each f-string's constant parts by themselves, as they are said."""
    found = []
    for path in python_files("vllm_steer"):
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_exist_in_the_package() -> None:
    """Catches a message in the table that the package no longer logs or returns."""
    (table,) = (t for t in tables(read(GUIDE)) if t[0][0] == "symptom")
    said = sentences()
    quotes = [row[1].removesuffix(" in the response") for row in table[1:] if row[1]]
    assert len(quotes) > 12
    assert [quote for quote in quotes if quote not in said] == []
    assert "a message that does not exist" not in said  # negative control

# SPDX-License-Identifier: Apache-2.0
"""The guide on keys and the threat model match the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from tests.docs.markdown import blocks, tables
from tests.repo.tree import ROOT, read
from vllm_steer.cli.main import app
from vllm_steer.limits import KEY_LIMITS
from vllm_steer.server.auth.authenticator import ADMIN_PATHS, INFERENCE_PATHS, PUBLIC_PATHS
from vllm_steer.server.auth.key_file import read_keys
from vllm_steer.server.auth.rights import Right

GUIDE, MODEL = "docs/guides/keys.md", "docs/design/threat-model.md"


def test_guide_commands_create_the_described_keys(tmp_path: Path) -> None:
    """Catches a command that no longer runs, and a renamed right or limit."""
    (code,) = (block.code for block in blocks(read(GUIDE)) if block.language == "bash")
    for line in code.splitlines():
        words = [str(tmp_path / word) if word == "keys.json" else word for word in shlex.split(line)[1:]]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    keys = {key.name: key for key in read_keys(tmp_path / "keys.json")}
    assert set(keys) == {"alice", "ops"}
    assert keys["alice"].rights == (Right.STEER, Right.CAPTURE)
    assert all(name in code or name in read("docs/reference/limits.md") for name in KEY_LIMITS)


def test_guide_lists_the_protected_paths() -> None:
    """Catches a path whose protection differs from the guide."""
    text = read(GUIDE)
    (shut,) = re.findall(r"without a key are rejected, except for (.*?);", text, re.DOTALL)
    assert set(re.findall("`(/.*?)`", shut)) == PUBLIC_PATHS
    (serving,) = re.findall(r"\* (`/v1`.*?), and the paths below them, are open to every key", text, re.DOTALL)
    assert tuple(re.findall("`(/.*?)`", serving)) == INFERENCE_PATHS
    assert all(f"`{path}`" in text for path in ADMIN_PATHS)


def test_threats_name_existing_tests() -> None:
    """Catches a protection without a test, and a test that was moved or deleted."""
    (table,) = tables(read(MODEL))
    for threat, _, tests in table[1:]:
        paths = [path.strip() for path in tests.split(",")]
        assert all(path.startswith("tests/") and (ROOT / path).exists() for path in paths), (threat, tests)

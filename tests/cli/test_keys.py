# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer keys``."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_steer.cli.main import app
from vllm_steer.server.auth.key_file import read_keys
from vllm_steer.server.auth.keys import find_key
from vllm_steer.server.auth.rights import Right


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def run(file: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["keys", *words, "--file", str(file)])


def test_creates_lists_and_revokes_keys(file: Path) -> None:
    """Catches a key that does not work, a secret shown a second time, and a key that cannot be revoked."""
    made = run(file, "new", "alice", "--right", "steer", "-r", "read", "-r", "steer", "--limit", "steering_requests=8")
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    key = find_key(read_keys(file), secret)
    assert key is not None
    assert (key.name, key.rights, key.limits) == ("alice", (Right.STEER, Right.READ), {"steering_requests": 8})
    assert file.stat().st_mode & 0o777 == 0o600
    other = run(file, "new", "bob").stdout.strip()
    listed = run(file, "list").stdout
    assert "alice" in listed and "steer, read" in listed and "steering_requests=8" in listed and "bob" in listed
    assert not any(hidden in listed for hidden in (secret, other, key.sha256, key.cache_salt))
    assert run(file, "revoke", "alice").exit_code == 0
    assert find_key(read_keys(file), secret) is None and find_key(read_keys(file), other) is not None


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("new", "alice"), 1, "already has a key alice"),
        (("new", "a b"), 1, "is not a valid name"),
        (("new", "b", "--right", "root"), 2, "root"),
        (("new", "b", "--limit", "steering_requests"), 2, "not a limit"),
        (("new", "b", "--limit", "requests=3"), 1, "steering_requests"),
        (("new", "b", "--limit", "steering_requests=3", "--limit", "steering_requests=4"), 2, "twice"),
        (("new", "b", "--limit", "steering_requests=0"), 1, "must be 1"),
        (("revoke", "bob"), 1, "has no key bob"),
    ],
)
def test_errors_leave_the_file_unchanged(words: tuple[str, ...], status: int, said: str, file: Path) -> None:
    """Catches a failed command that changes the file, and an invalid command that succeeds."""
    run(file, "new", "alice")
    before = file.read_bytes()
    result = run(file, *words)
    assert result.exit_code == status, result.output
    assert said in result.stderr
    assert file.read_bytes() == before


@pytest.mark.parametrize("command", [("new", "bob"), ("list",), ("revoke", "alice")])
def test_refuses_a_file_writable_by_others(command: tuple[str, ...], file: Path) -> None:
    """Catches keys accepted from a file that another user could have changed."""
    run(file, "new", "alice")
    before = file.read_bytes()
    file.chmod(0o660)
    result = run(file, *command)
    assert result.exit_code == 1 and "mode 0660" in result.stderr
    assert file.read_bytes() == before
    link = file.with_name("link")
    file.chmod(0o600)
    link.symlink_to(file)
    assert run(link, *command).exit_code == 1
    assert file.read_bytes() == before and link.is_symlink()


def test_only_new_creates_the_file(file: Path) -> None:
    """Catches a mistyped path treated as an empty key file."""
    for command in (("list",), ("revoke", "alice")):
        result = run(file, *command)
        assert result.exit_code == 1 and "No such file" in result.stderr
        assert not file.exists()

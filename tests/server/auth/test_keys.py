# SPDX-License-Identifier: Apache-2.0
"""Tests of the key file: content, permissions, and reloading by a server."""

from __future__ import annotations

import argparse
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs

from tests.server.auth.guarded import client_of, make_guarded_app, start, write_keys
from tests.server.test_flags import error_of, server_parser
from vllm_steer.errors import SteeringError
from vllm_steer.server.apply_flags import apply_flags
from vllm_steer.server.auth import key_file_watcher
from vllm_steer.server.auth.key_file import edit_keys, read_keys
from vllm_steer.server.auth.keys import PREFIX, find_key, generate_key, hash_secret
from vllm_steer.server.auth.rights import Right


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_key_file_contains_no_secrets(path: Path) -> None:
    """Catches a file from which keys can be recovered, shared salts, and file modes that let others read it."""
    secrets = write_keys(path, {"alice": [Right.STEER], "bob": []})
    text = path.read_text()
    assert all(secret.startswith(PREFIX) and len(secret) == len(PREFIX) + 43 for secret in secrets.values())
    assert not any(secret in text or secret.removeprefix(PREFIX) in text for secret in secrets.values())
    assert path.stat().st_mode & 0o777 == 0o600
    alice, bob = keys = read_keys(path)
    assert (alice.sha256, alice.rights) == (hash_secret(secrets["alice"]), (Right.STEER,))
    assert alice.cache_salt != bob.cache_salt
    assert find_key(keys, secrets["alice"]) == alice
    for wrong in ("", PREFIX, secrets["alice"][:-1], secrets["alice"] + " ", alice.sha256, alice.cache_salt, "\udc80"):
        assert find_key(keys, wrong) is None


def test_writes_are_atomic(path: Path) -> None:
    """Catches keys lost by a failed write, and leftover temporary files."""
    write_keys(path, {"alice": []})
    before = path.read_bytes()
    key = generate_key("alice", (), {})[0]
    with pytest.raises(SteeringError, match="same name"), edit_keys(path) as write:
        write((*read_keys(path), key))
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    with pytest.raises(SteeringError, match="No such file"), edit_keys(path.with_name("other")):
        pass


KEY = {"name": "me", "sha256": "0" * 64, "cache_salt": "s" * 32}
WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not a valid key file"),
    "no object": ([], "not a valid key file"),
    "a version of tomorrow": ({"version": 2, "keys": []}, "version 2"),
    "a right that is none": ({"version": 1, "keys": [{**KEY, "rights": ["root"]}]}, "root"),
    "a field too many": ({"version": 1, "keys": [{**KEY, "right": []}]}, "right"),
    "a key in clear": ({"version": 1, "keys": [{**KEY, "sha256": "vsk-abc"}]}, "hexadecimal"),
    "no salt": ({"version": 1, "keys": [{**KEY, "cache_salt": ""}]}, "secret"),
    "a name that breaks lines": ({"version": 1, "keys": [{**KEY, "name": "a\nb"}]}, "is not a valid name"),
    "a limit that is none": ({"version": 1, "keys": [{**KEY, "limits": {"requests": 1}}]}, "steering_requests"),
    "a limit of nothing": ({"version": 1, "keys": [{**KEY, "limits": {"steering_requests": 0}}]}, "must be 1"),
    "a shared salt": ({"version": 1, "keys": [KEY, {**KEY, "name": "b", "sha256": "1" * 64}]}, "same cache_salt"),
    "one key twice": ({"version": 1, "keys": [KEY, {**KEY, "name": "b", "cache_salt": "t" * 32}]}, "same sha256"),
}


@pytest.mark.parametrize(("content", "words"), WRONG.values(), ids=WRONG)
def test_rejects_invalid_files(content: Any, words: str, path: Path) -> None:
    """Catches an invalid file that is read as other rights or limits."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(0o600)
    with pytest.raises(SteeringError, match=words):
        read_keys(path)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o622, 0o604, 0o666, 0o640, 0o400])
def test_checks_the_file_mode(mode: int, path: Path) -> None:
    """Catches a file to which others can add keys, and a rejected file with a safe mode."""
    write_keys(path, {"me": []})
    path.chmod(mode)
    if mode in (0o640, 0o400):
        assert read_keys(path)
    else:
        with pytest.raises(SteeringError, match=f"mode {mode:04o}"):
            read_keys(path)


def test_rejects_links_directories_and_pipes(path: Path) -> None:
    """Catches a link that redirects the server to another file, and a start that blocks on a pipe."""
    write_keys(path, {"me": []})
    link, pipe = path.with_name("link"), path.with_name("pipe")
    link.symlink_to(path)
    os.mkfifo(pipe, 0o600)
    for wrong, words in ((link, "cannot be read"), (path.parent, "cannot be read"), (pipe, "not a regular file")):
        with pytest.raises(SteeringError, match=words):
            read_keys(wrong)


def test_rejects_file_of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches keys made up by another user of the machine."""
    write_keys(path, {"me": []})
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if path.stat().st_uid:
        with pytest.raises(SteeringError, match="another user"):
            read_keys(path)
    else:
        assert read_keys(path)  # files of root are trusted


def test_keys_flag(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that starts without its keys, and a relative path that is resolved again later."""
    write_keys(path, {"me": []})
    monkeypatch.chdir(path.parent)
    assert server_parser().parse_args(["--enable-steering", "--steering-keys", path.name]).steering_keys == str(path)
    assert "--enable-steering" in error_of(capsys, "--steering-keys", str(path))
    assert "no HTTP" in error_of(capsys, "--enable-steering", "--steering-keys", str(path), middleware=False)
    path.write_text("{")
    assert "not a valid key file" in error_of(capsys, "--enable-steering", "--steering-keys", str(path))
    assert "No such file" in error_of(capsys, "--enable-steering", "--steering-keys", str(path) + "x")


def test_rejects_front_ends_without_authentication(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches front ends of vLLM that serve requests without keys and without steering."""
    write_keys(path, {"me": []})

    def args(**more: Any) -> argparse.Namespace:
        return argparse.Namespace(enable_steering=True, steering_keys=str(path), middleware=[], **more)

    with pytest.raises(SteeringError, match="--grpc"):
        apply_flags(args(grpc=True))
    envs.disable_envs_cache()  # an engine in this process has cached all variables
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(SteeringError, match="VLLM_USE_RUST_FRONTEND"):
        apply_flags(args(grpc=False))
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    apply_flags(args(grpc=False))


async def test_server_reloads_the_key_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches revoked keys that stay valid, new keys that need a restart, and mishandled broken files.

    A broken file must not lock clients out, let everyone in, or be logged at every request.
    """
    errors: list[str] = []
    log = SimpleNamespace(error=lambda text, *args: errors.append(text % args), info=lambda *args: None)
    monkeypatch.setattr(key_file_watcher, "logger", log)
    old = write_keys(path, {"alice": [Right.READ]})["alice"]
    app = await start(make_guarded_app(path))

    async def status(secret: str | None) -> int:
        return (await client_of(app, secret).get("/v1/steering/set")).status_code

    assert [await status(old), await status(None)] == [200, 401]
    path.unlink()
    new = write_keys(path, {"alice": [Right.READ], "bob": []})
    assert [await status(old), await status(new["alice"]), await status(new["bob"])] == [401, 200, 403]
    good = path.read_bytes()
    for broken in (b"{", good[:-30], b""):
        path.write_bytes(broken)
        assert [await status(new["alice"]), await status(old), await status(None)] == [200, 401, 401]
    path.chmod(0o666)
    path.write_bytes(good.replace(b'"rights": []', b'"rights": ["read"]'))
    assert await status(new["bob"]) == 403
    assert len(errors) == 4 and "mode 0666" in errors[-1]
    path.unlink()
    assert [await status(new["alice"]) for _ in range(3)] == [200] * 3
    assert len(errors) == 5
    path.write_bytes(good.replace(b'"rights": []', b'"rights": ["read"]'))
    path.chmod(0o600)
    assert await status(new["bob"]) == 200


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE])
async def test_retries_after_temporary_read_errors(number: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a revoked key that stays valid after a temporary read error, and a flooded log."""
    errors: list[str] = []
    log = SimpleNamespace(error=lambda text, *args: errors.append(text % args), info=lambda *args: None)
    monkeypatch.setattr(key_file_watcher, "logger", log)
    monkeypatch.setattr(key_file_watcher, "LOG_INTERVAL_SECONDS", float("inf"))
    old = write_keys(path, {"alice": [Right.READ]})["alice"]
    app = await start(make_guarded_app(path))

    async def status(secret: str) -> int:
        return (await client_of(app, secret).get("/v1/steering/set")).status_code

    assert await status(old) == 200
    path.unlink()
    new = write_keys(path, {"alice": [Right.READ]})["alice"]
    really_open, tries = os.open, 0

    def fail(name: Any, *args: Any, **kwargs: Any) -> int:
        nonlocal tries
        if name == path:
            tries += 1
            raise OSError(number, os.strerror(number))
        return really_open(name, *args, **kwargs)

    with monkeypatch.context() as failing:
        failing.setattr(os, "open", fail)
        assert [await status(old) for _ in range(3)] == [200] * 3
    assert tries == 3
    assert len(errors) == 1 and os.strerror(number) in errors[0]
    assert [await status(old), await status(new)] == [401, 200]


def test_reads_an_invalid_file_once(path: Path) -> None:
    """Catches requests that each read an unchanged invalid file again."""
    write_keys(path, {"alice": []})
    followed = key_file_watcher.KeyFileWatcher(path)
    for make in (lambda: path.write_text("{"), path.unlink, lambda: path.symlink_to("elsewhere")):
        make()
        assert followed.is_stale()
        followed.refresh()
        assert not followed.is_stale()
    path.unlink()
    path.mkdir()
    followed.refresh()
    assert not followed.is_stale()


async def test_broken_key_file_prevents_start(path: Path) -> None:
    """Catches a server that starts without authentication because its key file is broken."""
    path.write_text("{")
    path.chmod(0o600)
    app = make_guarded_app(path)
    with pytest.raises(SteeringError, match="not a valid key file"):
        await start(app)
    assert (await client_of(app).post("/v1/completions", json={})).status_code == 400  # were it asked all the same

# SPDX-License-Identifier: Apache-2.0
"""The commands that connect to a server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

import vllm_steer
from tests.registry.modules import module, vector
from vllm_steer import SteeringError
from vllm_steer.cli.main import app as commands
from vllm_steer.cli.output import print_table
from vllm_steer.registry.module_files import read_module, write_module

BASE = {"base": {"post_block": {"1": vector(1).tolist()}}}


def run(url: str, *arguments: str, stdin: str | None = None, status: int = 0) -> str:
    done = CliRunner().invoke(commands, [*arguments, "--url", url], input=stdin)
    assert done.exit_code == status, done.output
    return done.output


def test_modules(url: str, tmp_path: Path) -> None:
    """Catches a command that calls another endpoint, and output that differs from the result."""
    (tmp_path / "calm.safetensors").write_bytes(write_module(module()))
    (tmp_path / "terse.json").write_text(json.dumps({**BASE, "description": "few \x1b[2Jwords"}))
    assert module().digest in run(url, "modules", "add", "calm", str(tmp_path / "calm.safetensors"))
    run(url, "modules", "add", "terse", str(tmp_path / "terse.json"))
    listed = run(url, "modules", "ls")
    assert module().digest[:19] in listed
    assert "few \\x1b[2Jwords" in listed
    shown = run(url, "modules", "show", "calm")
    assert all(word in shown for word in (module().digest, "joy", "base", "decode", "ablate at post_block"))
    assert json.loads(run(url, "modules", "show", "calm", "--json"))["digest"] == module().digest
    assert "0.75" in shown and "pre_attn" in shown  # how the probe `whole` is read
    (tmp_path / "long.json").write_text(json.dumps({**BASE, "provenance": {"stream": '{"1": 54.5}'}}))
    run(url, "modules", "add", "long", str(tmp_path / "long.json"))
    strength = 54.5 / float(np.linalg.norm(vector(1)))
    assert ["post_block", "1", "54.5", f"{strength:.4g}"] in [
        line.split() for line in run(url, "modules", "show", "long").splitlines()
    ]
    run(url, "modules", "rm", "long")
    run(url, "modules", "export", "calm", str(tmp_path / "again.safetensors"))
    assert read_module((tmp_path / "again.safetensors").read_bytes())[0] == module()
    assert "is a folder" in run(url, "modules", "export", "calm", str(tmp_path), status=1)
    assert "calm: 1 versions deleted" in run(url, "modules", "rm", "calm")
    assert [each["name"] for each in json.loads(run(url, "modules", "ls", "--json"))["data"]] == ["terse"]
    assert "unknown module 'calm'" in run(url, "modules", "rm", "calm", status=1)


def test_set_and_status(url: str, tmp_path: Path) -> None:
    """Catches a misread scale, a scale beside a dose, a length of the stream that is not shown, and a stale status."""
    (tmp_path / "terse.json").write_text(json.dumps(BASE))
    run(url, "modules", "add", "terse", str(tmp_path / "terse.json"))
    assert "terse" in run(url, "set", "terse=-1.5", "--file", str(tmp_path / "terse.json"))
    status = run(url, "status")
    assert all(word in status for word in ("model: tiny", "modules: terse", "epoch: 2", "-1.5", "base"))
    assert "base" not in run(url, "set", "terse", "--replace")
    (tmp_path / "long.json").write_text(json.dumps({**BASE, "provenance": {"stream": '{"1": 54.5}'}}))
    run(url, "modules", "add", "long", str(tmp_path / "long.json"))
    set_lines = [line.split() for line in run(url, "set", "terse=2", "--dose", "long=-0.5").splitlines()]
    assert [(line[0], *line[2:]) for line in set_lines if line[:1] in (["terse"], ["long"])] == [
        ("terse", "2"), ("long", "-0.5")
    ]  # fmt: skip
    assert ["post_block", "1", "54.5", "long"] in [line.split() for line in run(url, "status").splitlines()]
    run(url, "set", "--dose", "long", status=2)
    assert "global steering: none" in run(url, "set", "--clear")
    run(url, "set", "terse=x", status=2)
    run(url, "set", "terse", "--clear", status=2)
    assert "set: is empty" in run(url, "set", status=1)


def test_file_and_command_line_disagree(url: str, tmp_path: Path) -> None:
    """Catches one of two values being ignored, and a traceback for two values of ``replace``."""
    module_file, set_file = tmp_path / "terse.json", tmp_path / "set.json"
    module_file.write_text(json.dumps({**BASE, "name": "terse"}))
    assert "name: calm on the command line differs" in run(url, "modules", "add", "calm", str(module_file), status=1)
    run(url, "modules", "add", "terse", str(module_file))
    set_file.write_text(json.dumps({"modules": ["terse"], "replace": False}))
    assert "modules: differs between" in run(url, "set", "terse=2", "--file", str(set_file), status=1)
    assert "replace: differs between" in run(url, "set", "--replace", "--file", str(set_file), status=1)
    assert "global steering: none" in run(url, "status")
    set_file.write_text(json.dumps({"modules": None, "replace": True}))
    assert "terse" in run(url, "set", "terse", "--replace", "--file", str(set_file))


@pytest.mark.parametrize("command", [("status",), ("modules", "ls"), ("set", "--clear")])
@pytest.mark.parametrize("body", ["<html>", '{"data": []}', "[]"])
def test_other_servers(command: tuple[str, ...], body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback if the address belongs to another server."""
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    monkeypatch.setattr("httpx._client.HTTPTransport", lambda **options: transport)
    assert "error: http://here is not a server with vllm-steer" in run("http://here", *command, status=1)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "'localhost:8000' has no scheme; write http://localhost:8000"),
        ("127.0.0.1", "'127.0.0.1' has no scheme; write http://127.0.0.1"),
        ("ftp://x", "'ftp://x' must begin with http:// or https://"),
        ("http://x:8000/v1/", "'http://x:8000/v1/' ends with /v1, which is added to it; write http://x:8000"),
    ],
)
def test_a_url_has_a_scheme_and_no_version(url: str, words: str) -> None:
    """Catches "unsupported protocol" or "Not Found", which do not tell what to write."""
    assert words in run(url, "status", status=1)
    with pytest.raises(SteeringError, match="url"):
        vllm_steer.client.AsyncClient(url)


def test_unreachable_server() -> None:
    """Catches a traceback instead of an error message."""
    shown = run("http://127.0.0.1:9", "status", status=1)
    assert re.search("error: cannot reach http://127.0.0.1:9.*: .* refused; start the server, or give", shown)
    assert "error: " in run("no url", "status", status=1)


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--plot", "grid.picture", "unknown suffix .picture; use one of"),
        ("--plot", "folder.png", "is a folder; name a file in it"),
        ("--html", "folder.png", "is a folder; name a file in it"),
        ("--out", "folder.png", "is a folder; name a file in it"),
        ("--out", "none/grid", "folder not found: "),
        ("--out", "x" * 300, "cannot be written: File name too long"),
    ],
)
def test_patch_checks_its_files_first(option: str, name: str, message: str, tmp_path: Path) -> None:
    """Catches a study whose result is lost at its end, because a file cannot be written."""
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "study.json").write_text("{}")
    shown = run("http://127.0.0.1:9", "patch", str(tmp_path / "study.json"), option, str(tmp_path / name), status=1)
    assert message in shown
    shown = run("http://127.0.0.1:9", "patch", str(tmp_path / "study.json"), option, str(tmp_path / "a.svg"), status=1)
    assert "cannot reach" in shown
    assert not (tmp_path / "a.svg").exists()


def test_tables_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a row of several lines, of which ``grep`` finds one."""
    print_table(("name", "description"), [("calm", "word " * 800), ("terse", "")])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "word" in line] == [["calm", "word"]]


def test_chat(url: str, app: FastAPI) -> None:
    """Catches swapped sides, mixed conversations, and a rejected question that stays in a conversation."""
    script = (
        "Hello\n/modules terse=2\nAgain\n/modules missing\nWhat?\n/modules terse=x\n/reset\n/modules\nLast\n/quit\nno\n"
    )
    shown = run(url, "chat", "calm=1.5", "--system", "Be brief.", stdin=script, status=1)
    answers = [line for line in shown.splitlines() if line.startswith("[")]
    assert answers[:4] == [
        "[plain] I am plain.",
        "[calm=1.5] I am calm\\x1b[2J.",
        "[plain] I am plain.",
        "[terse=2] I am terse\\x1b[2J.",
    ]
    assert "error: unknown module 'missing'" in shown
    assert answers[-2:] == ["[plain] I am plain.", "[no modules] I am plain."]
    system = {"role": "system", "content": "Be brief."}
    steered = [body for body in app.state.bodies if "steering_modules" in body]
    assert [body["steering_modules"] for body in steered] == [[["calm", 1.5]], [["terse", 2.0]], [["missing", 1.0]]]
    assert steered[0]["messages"] == [system, {"role": "user", "content": "Hello"}]
    assert [each["content"] for each in steered[1]["messages"]] == ["Be brief.", "Hello", "I am calm\x1b[2J.", "Again"]
    assert [each["content"] for each in steered[2]["messages"]][-2:] == ["I am terse\x1b[2J.", "What?"]
    for body in app.state.bodies[-2:]:
        assert body["messages"] == [system, {"role": "user", "content": "Last"}]
    assert all(body["temperature"] == 0 and body["max_tokens"] == 512 for body in app.state.bodies)


@pytest.mark.parametrize(
    ("script", "status"), [("Hello\n/quit\n", 0), ("/modules missing\nWhat?\n", 1), ("/modules calm=x\nHello\n", 1)]
)
def test_chat_status(url: str, script: str, status: int) -> None:
    """Catches a status of 0 after an error, and an error on stdout among the answers."""
    done = CliRunner().invoke(commands, ["chat", "--url", url], input=script)
    assert done.exit_code == status
    assert ("error: " in done.stderr) is bool(status)
    assert "error: " not in done.stdout


@pytest.mark.parametrize("scale", ["nan", "inf"])
def test_a_chat_goes_on_after_a_scale_without_a_value(url: str, scale: str) -> None:
    """Catches scales that no request can carry, with which the next question ended the chat."""
    done = CliRunner().invoke(commands, ["chat", "--url", url], input=f"/modules calm={scale}\nHello\nAgain\n")
    assert done.exit_code == 1 and "is not a finite number" in done.stderr
    assert done.stdout.count("[plain] I am plain") == 2


@pytest.mark.parametrize("command", ["modules", "set", "status", "chat"])
def test_help_needs_no_server(command: str) -> None:
    """Catches help that connects to a server."""
    assert CliRunner().invoke(commands, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--model", "no/model"], 1, "error: the model no/model cannot be started: there is no such model"),
        (["--dtype", "float32"], 2, "options of vLLM need --model"),
        (["--model", "m", "--plott", "x"], 1, "unrecognized arguments: --plott x"),
        (["--model", "m", "--dtype", "float23"], 1, "argument --dtype: invalid choice: 'float23'"),
    ],
)
def test_patch_reports_options_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], status: int, message: str
) -> None:
    """Catches a traceback for a model that does not exist, and a dtype that is ignored."""

    def start(*arguments: Any, **settings: Any) -> None:
        raise OSError("there is no such model")

    monkeypatch.setattr(vllm_steer, "LLM", start)
    (study := tmp_path / "study.yaml").write_text("clean: a\ncorrupt: b\nanswer: c\nmetric: logprob\n")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(commands, ["patch", str(study), *options])
    assert done.exit_code == status and message in done.output


@pytest.mark.parametrize(
    ("study", "options", "points", "passed"),
    [
        ("points: [hook_mlp_out, mlps_input]", [], ["mlp_in", "mlp_out"], {}),
        ("points: mlp_out", [], ["mlp_out"], {}),
        ("", [], [], {}),
        (
            "", ["--enforce-eager", "--dtype", "float32", "--max-model-len", "1k"], [],
            {"enforce_eager": True, "dtype": "float32", "max_model_len": 1000},
        ),
    ],
)  # fmt: skip
def test_engines_of_studies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, study: str, options: list[str], points: list[str], passed: Any
) -> None:
    """Catches an engine without the points that a study names, also as other libraries do, and options that are lost.

    No option can switch the points on; a study that cannot pass ``--enforce-eager`` compiles its model for minutes.
    """
    started = []

    def start(model: str, **settings: Any) -> None:
        started.append((model, settings))
        raise SteeringError("model", "stop here")

    monkeypatch.setattr(vllm_steer, "LLM", start)
    (file := tmp_path / "study.yaml").write_text(f"clean: a\ncorrupt: b\nanswer: c\nmetric: logprob\n{study}\n")
    done = CliRunner().invoke(commands, ["patch", str(file), "--model", "m", *options])
    assert "stop here" in done.output
    assert started == [("m", {"enable_steering": True, "steering_config": {"points": points}, **passed})]

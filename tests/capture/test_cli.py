# SPDX-License-Identifier: Apache-2.0
"""The commands ``vllm-steer captures``: output, exports and errors."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.capture.captured import captured
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.results import SubmittedRequest
from vllm_steer.cli.captures import _format_ranges, app
from vllm_steer.cli.output import printable

HOSTILE = "a\x1b[2Jb\nc\u202e[red]d"


@pytest.fixture
def root(tmp_path):
    consumer = FilesystemConsumer(root=str(tmp_path / "root"), layout="packed")
    for i, name in enumerate(("first", "second", HOSTILE)):
        consumer.accept(captured(name, seed=i, sample=i))
    consumer.close()
    return tmp_path / "root"


def run(*words, code=0):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def test_ls(root):
    """Catches missing requests and columns."""
    output = run("ls", root)
    assert all(word in output for word in ("first", "second", "tiny", "5+7", "packed-"))
    assert len([line for line in output.splitlines() if "packed-" in line]) == 3


def test_escapes_control_characters(root):
    """Catches request ids that control the terminal."""
    for command in ("ls", "show"):
        output = run(command, root)
        assert "\x1b" not in output and "\u202e" not in output
        assert "a\\x1b[2Jb\\nc\\u202e[red]d" in output
    assert printable("gewöhnlich 文") == "gewöhnlich 文"


def test_json(root):
    """Catches missing properties, and JSON that spans lines."""
    for command in ("ls", "show"):
        lines = [json.loads(line) for line in run(command, root, "--json").splitlines()]
        assert [line["request_id"] for line in lines] == ["first", "second", HOSTILE]
        site = {"point": "pre_attn", "layer": 0, "shape": [5, 16], "dtype": "float32"}
        assert site in lines[0]["sites"] and len(lines[0]["sites"]) == 3


def test_run_and_tag(tmp_path):
    """Catches an ignored option, and missing requests that are not listed or of another run."""
    for name in ("a", "b"):
        consumer = FilesystemConsumer(root=str(tmp_path), layout="packed", run=name)
        for i in range(3):
            request = captured(str(i), sample=i, options={"tag": f"prompt {i}"})
            consumer.begin(SubmittedRequest(request.request_id, request.sample, i, request.spec))
            if i != 1:
                consumer.accept(dataclasses.replace(request, submission=i))
        consumer.close()
    assert [line["run"] for line in map(json.loads, run("ls", tmp_path, "--json").splitlines())] == [*"aabb"]
    (line,) = map(json.loads, run("ls", tmp_path, "--run", "b", "--tag", "prompt 2", "--json").splitlines())
    assert (line["run"], line["submission"], line["request_id"]) == ("b", 2, "2")
    assert "has no run 'c'" in run("ls", tmp_path, "--run", "c", code=1)
    lines = [json.loads(line) for line in run("missing", tmp_path, "--json").splitlines()]
    assert [(line["run"], line["submission"], line["tag"]) for line in lines] == [
        ("a", 1, "prompt 1"),
        ("b", 1, "prompt 1"),
    ]
    shown = run("missing", tmp_path, "--run", "b")
    assert "prompt 1" in shown and "prompt 0" not in shown and " a " not in shown


def test_nothing_is_missing(tmp_path):
    """Catches a table without lines, and stored requests that are listed."""
    consumer = FilesystemConsumer(root=str(tmp_path))
    request = captured("0")
    consumer.begin(SubmittedRequest("0", 0, 0, request.spec))
    consumer.accept(dataclasses.replace(request, submission=0))
    consumer.close()
    assert run("missing", tmp_path) == "none\n"


def test_show(root):
    """Catches statistics of another request or site."""
    output = run("show", root, "--request-id", "second")
    norm = np.linalg.norm(captured(seed=1).tensor("post_block", 3).numpy(), axis=1).mean()
    assert "request_id: second" in output and "first" not in output
    assert all(word in output for word in ("post_block[3]", "[5, 16]", "1, 3, 5, 7, 9", f"{norm:.3f}"))


def test_format_ranges():
    """Catches ranges that are off by one or not shortened."""
    assert _format_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert _format_ranges([]) == "none"
    assert _format_ranges(list(range(0, 100, 2))) == "0, 2, 4, 6, ..., 94, 96, 98"


def test_sample(root):
    """Catches an ignored option."""
    assert "second" in run("ls", root, "--sample", 1)
    assert "first" not in run("ls", root, "--sample", 1)


def test_export(root, tmp_path):
    """Catches rows of another request or site."""
    out = tmp_path / "out.npz"
    assert "1 sites" in run("export", root, out, "--request-id", "second", "--point", "post_block", "--layer", 3)
    with np.load(out) as archive:
        np.testing.assert_array_equal(archive["0.post_block.3"], captured(seed=1).tensor("post_block", 3).numpy())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "no-such-folder"], "no-such-folder"),
        (["ls", "{root}", "--request-id", "third"], "no captures found"),
        (["ls", "{root}", "--sample", "9"], "no captures found"),
        (["show", "{bad}"], "bad.safetensors"),
        (["export", "{root}", "{tmp}/out.csv"], ".npz or .parquet"),
        (["export", "{root}", "{tmp}/out.npz", "--layer", "9"], "no rows match"),
        (
            ["export", "{root}", "{tmp}/out.npz", "--point", "resid_post.3", "--layer", "0"],
            "--point resid_post.3 is a site of layer 3, but --layer is 0",
        ),
        (["export", "{root}", "{bad}"], "unknown suffix"),
        (["export", "{root}", "{there}"], "there.npz exists; name another file, or remove this one"),
    ],
)
def test_errors_have_no_traceback(root, tmp_path, words, message):
    """Catches a traceback instead of an error message, and rows of another layer than the named site's."""
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"x" * 100)
    there = tmp_path / "there.npz"
    there.write_bytes(b"")
    output = run(*(word.format(root=root, tmp=tmp_path, bad=bad, there=there) for word in words), code=1)
    assert output.startswith("error: ") or "\nerror: " in output
    assert message in output and "Traceback" not in output


def test_a_closed_pipe_is_not_an_error(root):
    """Catches an error message if the reader of the output ends first, as ``head`` does."""
    words = [sys.executable, "-m", "vllm_steer.cli.main", "captures", "ls", str(root), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 1 and "rror" not in errors

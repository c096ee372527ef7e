# SPDX-License-Identifier: Apache-2.0
"""The README's blocks run, and its tables are the tables of the code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import Block, blocks, tables
from tests.repo.tree import ROOT, read
from vllm_steer.points import POINTS, points_on
from vllm_steer.spec import parse_fields
from vllm_steer.spec.edit import KINDS

README = "README.md"
MODEL = ROOT / "demo/model"

# Small enough for any machine, and one process, so that a block's error is the error that the test shows.
ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}

# Runs the blocks that it reads from stdin, in order, in one namespace; then shows the names asked for.
RUNNER = """
import json, sys
asked = json.load(sys.stdin)
namespace = {"__name__": "__main__"}
for line, code in asked["blocks"]:
    exec(compile("\\n" * line + code, asked["file"], "exec"), namespace)
print(asked["mark"] + json.dumps(eval(asked["show"], namespace)))
"""


def of_language(*languages: str) -> list[Block]:
    return [block for block in blocks(read(README)) if block.language in languages]


def run_python(python_blocks: list[Block], show: str) -> object:
    """Run blocks in a process of their own, in the root; the value of the expression `show` after them."""
    mark = "shown: "
    asked = {"blocks": [(b.line, b.code) for b in python_blocks], "file": README, "mark": mark, "show": show}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(asked),
        env=os.environ | ENGINE,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"a block of {README} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.rpartition(mark)[2])


def run_with_fake_curl(block: Block, folder: Path) -> str:
    """Run a block of shell with a `curl` that prints what it is given to send."""
    curl = folder / "curl"
    curl.write_text("#!/bin/sh\ncat\n")
    curl.chmod(0o755)
    path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    return subprocess.run(
        command, env=os.environ | {"PATH": path}, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@pytest.mark.slow
def test_python_blocks_run_and_steer() -> None:
    """Catches an example that no longer runs, and one that runs and answers unsteered."""
    python_blocks = of_language("python")
    assert python_blocks
    plain, steered = run_python(python_blocks, "[output.outputs[0].text for output in outputs]")
    assert plain and steered and plain != steered


def test_runner_keeps_one_namespace_and_shows_failures() -> None:
    """Catches a runner that passes whatever the blocks do."""
    assert run_python([Block("python", "a = 1", 1), Block("python", "b = a + 1", 5)], "b") == 2
    with pytest.raises(pytest.fail.Exception, match=r'README\.md", line 8'):
        run_python([Block("python", "1 / 0", 7)], "1")


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    """Catches a block that no test looks at."""
    assert {block.language for block in blocks(read(README))} <= {"python", "bash"}


@pytest.mark.parametrize("block", of_language("bash"), ids=lambda block: f"line{block.line}")
def test_shell_block_is_sound(block: Block) -> None:
    """Catches a syntax error, and a make target or a command of the environment that does not exist."""
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    targets = re.findall(r"^make ([\w-]+)", block.code, re.MULTILINE)
    assert set(targets) <= set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    for command in re.findall(r"^\.venv/bin/([\w-]+)", block.code, re.MULTILINE):
        assert Path(sys.executable).with_name(command).exists()


def test_request_bodies_are_accepted(tmp_path: Path) -> None:
    """Catches a body that is not JSON, is refused, or has a vector that is not of the model's width."""
    requests = [block for block in of_language("bash") if block.code.startswith("curl")]
    assert requests
    width = json.loads((MODEL / "config.json").read_text())["hidden_size"]
    for block in requests:
        body = json.loads(run_with_fake_curl(block, tmp_path))
        edits = parse_fields({name: value for name, value in body.items() if "steering" in name})
        assert edits
        assert {edit.vector.size for edit in edits} == {width}


def table_with(heading: str) -> list[list[str]]:
    """The body of the README's table whose first heading this is."""
    (table,) = (table for table in tables(read(README)) if table[0][0] == heading)
    return table[1:]


def test_points_are_those_of_the_code() -> None:
    """Catches a hook point that the README lacks, or describes otherwise than the code does."""
    always = [POINTS[name] for name in points_on(())]
    assert table_with("point") == [[point.name, point.identity, point.seen_by] for point in always]


def test_kinds_are_those_of_the_code() -> None:
    """Catches an edit that the README lacks, or whose formula is another."""
    assert table_with("kind") == [[kind.name, kind.formula] for kind in KINDS.values()]

# SPDX-License-Identifier: Apache-2.0
"""Running the code blocks of a document."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import Block, blocks
from tests.repo.tree import ROOT, read
from tests.warm import run_warm

# One process, so that an error in a block is the error that the test shows; small enough for any machine.
ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
RESULT_MARK = "result of the blocks: "

# Runs the blocks in order in one namespace, then prints the value of an expression.
_PROGRAM = """
import json
job = json.loads({job!r})
namespace = {{"__name__": "__main__"}}
for file, line, code in job["blocks"]:
    exec(compile("\\n" * line + code, file, "exec"), namespace)
print(job["mark"] + json.dumps(eval(job["expression"], namespace)))
"""


def blocks_of(file: str, *languages: str) -> list[Block]:
    """Return the blocks of a document in one of the languages."""
    return [block for block in blocks(read(file), file) if block.language in languages]


def offline_blocks(file: str) -> list[Block]:
    """Return the Python blocks of a document that do not connect to a server."""
    return [block for block in blocks_of(file, "python") if "Client(" not in block.code]


def client_blocks(file: str) -> list[Block]:
    """Return the Python blocks of a document that connect to a server."""
    return [block for block in blocks_of(file, "python") if "Client(" in block.code]


def run_python(python_blocks: list[Block], expression: str, *, warm: bool = True) -> object:
    """Run blocks in a new process and return the value of ``expression`` after them.

    The process runs in a temporary folder with the demo and the chat model, so that files of a block are removed.

    Args:
        python_blocks: The blocks.
        expression: What to return.
        warm: Start with vLLM imported, as :mod:`tests.warm` does; otherwise start a Python.
    """
    job = {
        "blocks": [(block.file, block.line, block.code) for block in python_blocks],
        "mark": RESULT_MARK,
        "expression": expression,
    }
    program = _PROGRAM.format(job=json.dumps(job))
    environment = os.environ | ENGINE_ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("demo", ".models"):
            Path(folder, name).symlink_to(ROOT / name)
        done: Any
        if warm:
            done = run_warm(program, environment=environment, folder=Path(folder))
        else:
            done = subprocess.run(
                [sys.executable, "-c", program],
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
    if done.returncode:
        pytest.fail(f"a block failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.rpartition(RESULT_MARK)[2])


def run_with_fake_curl(block: Block, folder: Path) -> str:
    """Run a shell block with a `curl` that prints the body that it would send."""
    curl = folder / "curl"
    curl.write_text("#!/bin/sh\ncat\n")
    curl.chmod(0o755)
    path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    return subprocess.run(
        command, env=os.environ | {"PATH": path}, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout

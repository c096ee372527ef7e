# SPDX-License-Identifier: Apache-2.0
"""What the package's code must not do: check with `assert`, and turn data into code."""

import ast
from pathlib import Path

import pytest

from tests.repo.tree import python_files, read

# Reading any of these formats runs what the data says.
CODE_FORMATS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CODE_CALLS = {"eval", "exec", "compile", "__import__"}


def faults(source: str) -> list[str]:
    """The rules that `source` breaks, each with its line."""
    return [f"line {node.lineno}: {fault}" for node in ast.walk(ast.parse(source)) for fault in faults_of(node)]


def faults_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Assert():
            return ["assert: gone under python -O; raise an error"]
        case ast.Import(names=names):
            return [f"import {a.name}" for a in names if a.name.partition(".")[0] in CODE_FORMATS]
        case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in CODE_FORMATS:
            return [f"from {module} import"]
        case ast.Call(func=ast.Name(id=name)) if name in CODE_CALLS:
            return [f"{name}()"]
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
            return ["torch.load(): reads pickles"]
        case ast.Call(func=ast.Attribute(attr=("load" | "loads") as name), keywords=keywords):
            return [f"{name}(allow_pickle)" for keyword in keywords if keyword.arg == "allow_pickle"]
    return []


@pytest.mark.parametrize("path", python_files("vllm_steer"), ids=str)
def test_source_keeps_the_rules(path: Path) -> None:
    """Catches a check that python -O removes, and input that could run as code."""
    assert faults(read(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    assert x > 0",
        "import pickle",
        "import cloudpickle as p",
        "def f():\n    from pickle import loads",
        "eval('1')",
        "exec('x = 1')",
        "torch.load('x')",
        "np.load('x', allow_pickle=True)",
    ],
)
def test_faults_are_seen(source: str) -> None:
    """Catches a scan that passes everything."""
    assert len(faults(source)) == 1


@pytest.mark.parametrize("source", ["model.eval()", "re.compile('x')", "json.loads('1')", "import json"])
def test_lookalikes_pass(source: str) -> None:
    """Catches a scan that would forbid ordinary code."""
    assert faults(source) == []

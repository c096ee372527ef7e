# SPDX-License-Identifier: Apache-2.0
"""Constructs that the package's code must not contain: `assert` as a check, and formats or calls that run data."""

import ast
from pathlib import Path

import pytest

from tests.repo.tree import offenders, python_files, read

# Reading any of these formats executes code that the data names.
CODE_FORMATS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CODE_CALLS = {"eval", "exec", "compile", "__import__"}


def faults(source: str) -> list[str]:
    """Return the forbidden constructs in `source`, each with its line."""
    return [f"line {node.lineno}: {fault}" for node in ast.walk(ast.parse(source)) for fault in node_faults(node)]


def node_faults(node: ast.AST) -> list[str]:
    match node:
        case ast.Assert():
            return ["assert: removed by python -O; raise an error"]
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


def test_the_package_has_no_forbidden_constructs() -> None:
    """Catches a check that `python -O` removes, and input that could run as code."""

    def find(path: Path) -> list[str]:
        return faults(read(path))

    assert offenders(python_files("vllm_steer"), find) == {}


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
def test_faults_are_found(source: str) -> None:
    """Catches a scan that accepts everything."""
    assert len(faults(source)) == 1


@pytest.mark.parametrize("source", ["model.eval()", "re.compile('x')", "json.loads('1')", "import json"])
def test_similar_code_passes(source: str) -> None:
    """Catches a scan that forbids ordinary code."""
    assert faults(source) == []

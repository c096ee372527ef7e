# SPDX-License-Identifier: Apache-2.0
"""Uses of vLLM in the source of the package: imports, private attributes, attributes of overridden classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_steer"


def sources() -> dict[str, str]:
    """Return the source of every module of the package by path."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def imported(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the importing files of each name of vLLM, ``module:name``, or ``module:`` for a module."""
    found: dict[str, set[str]] = {}
    for file, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
                names = [f"{node.module}:{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [f"{alias.name}:" for alias in node.names if alias.name.partition(".")[0] == "vllm"]
            else:
                continue
            for name in names:
                found.setdefault(name, set()).add(file)
    return found


def foreign_private_attributes(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the files that read or set each attribute with a leading underscore that the package does not define."""
    own, used = set[str](), dict[str, set[str]]()
    for file, text in files.items():
        tree = ast.parse(text)
        own |= set(_defined(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                used.setdefault(node.attr, set()).add(file)
    return {name: where for name, where in used.items() if name not in own}


def attributes_of_base(text: str, cls: str) -> set[str]:
    """Return the attributes of ``self`` and ``super()`` that a class uses and does not define."""
    tree = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == cls)
    own = set(_defined(tree))
    overridden = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr not in own:
            found.add(node.attr)
        of_super = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
        if of_super and node.attr not in overridden:
            found.add(node.attr)
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else (target,):
                if isinstance(each, ast.Name):
                    yield each.id
                elif (
                    isinstance(each, ast.Attribute)
                    and isinstance(each.value, ast.Name)
                    and each.value.id in ("self", "cls")
                ):
                    yield each.attr

# SPDX-License-Identifier: Apache-2.0
"""Uses of vLLM in the source of the package: imports, private attributes, attributes of overridden classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_steer"
INTERNALS = "vllm_steer.compat.internals"
OUR_TEXTS = {"LIST_ALL", "NOT_INSTALLED"}
"""Names of ``compat.internals`` that are not vLLM's."""


def sources() -> dict[str, str]:
    """Return the source of every module of the package by path."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def imported(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the files that import each name from ``vllm`` or from ``compat.internals``."""
    found: dict[str, set[str]] = {}
    for file, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module in ("vllm", INTERNALS):
                names = [alias.name for alias in node.names if alias.name not in OUR_TEXTS]
            elif isinstance(node, ast.Import):
                names = [f"{alias.name}:" for alias in node.names if alias.name.partition(".")[0] == "vllm"]
            else:
                continue
            for name in names:
                found.setdefault(name, set()).add(file)
    return found


def foreign_private_attributes(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the files that use each private attribute that neither the same file nor one of a base class defines.

    Attributes named by a string, as in ``getattr(x, "_name")``, count too.
    """
    used: dict[str, set[str]] = {}
    for file, text in files.items():
        tree = ast.parse(text)
        own = set(_defined(tree)).union(*(_defined(ast.parse(files[base])) for base in _files_of_bases(tree, files)))
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else _named_attribute(node)
            if name.startswith("_") and not name.startswith("__") and name not in own:
                used.setdefault(name, set()).add(file)
    return used


def _files_of_bases(tree: ast.AST, files: Mapping[str, str]) -> set[str]:
    """Return the files of ours from which a file imports the base classes of its classes."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {base.id for cls in classes for base in cls.bases if isinstance(base, ast.Name)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    modules = {str(node.module) for node in imports if bases & {alias.name for alias in node.names}}
    return {f"{module.removeprefix('vllm_steer.').replace('.', '/')}.py" for module in modules} & files.keys()


def _named_attribute(node: ast.AST) -> str:
    """Return the attribute that a call of ``getattr`` and the like names, or an empty string."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return ""
    function, name = node.func, node.args[1]
    is_access = isinstance(function, ast.Name) and function.id in ("getattr", "setattr", "hasattr", "delattr")
    return str(name.value) if is_access and isinstance(name, ast.Constant) else ""


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

# SPDX-License-Identifier: Apache-2.0
"""Which sources of a decoder-layer class its recipe was proven on.

A recipe is a claim about what ``forward`` does with the residual stream, so it holds for the code that it was proven
on and for no other. The digest of a class is that of its ``forward`` and of every method of its own that ``forward``
calls, directly or not, and of the same of a submodule within which the recipe has a tap, as syntax: comments,
docstrings, annotations and formatting play no part, and neither do the platform and the version of Python.
``digests.json``, written by ``scripts/digests.py``, lists them by package and version.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from vllm_steer.models.layers import INHERITED
from vllm_steer.models.recipes import PROVEN, qualified_class

FILE = "digests.json"
WITHIN: Mapping[str, str] = {"vllm.model_executor.models.dbrx.DbrxBlock": "DbrxFusedNormAttention"}
"""Layers that leave their first sum to a submodule: its class, of the same module as theirs."""


class NoSourceError(Exception):
    """The class has no Python source to be compared."""


def digest_of(cls: type) -> str:
    """SHA-256, in hex, of what ``cls`` does in ``forward``; raises :class:`NoSourceError`."""
    methods = _methods(cls)
    within = WITHIN.get(f"{cls.__module__}.{cls.__qualname__}")
    if within is not None:
        inner = getattr(import_module(cls.__module__), within, None)
        if inner is None:
            raise NoSourceError(f"there is no {within} beside it")
        methods |= {f"{within}.{name}": tree for name, tree in _methods(inner).items()}
    seen = hashlib.sha256()
    for name, tree in sorted(methods.items()):
        seen.update(f"{name}\n".encode())
        for word in _words(tree):
            # Lengths keep neighbours apart.
            seen.update(f"{len(word)}:{word}\n".encode())
    return seen.hexdigest()


@cache
def proven_digests() -> Mapping[str, Mapping[str, str]]:
    """``{"vllm 0.32.0": {class: digest}}``: what the conformance tests ran on."""
    table: dict[str, dict[str, str]] = json.loads((files(__package__) / FILE).read_text())
    return table


def why_unproven(cls: type) -> str | None:
    """The reason why no recipe was proven on this very class, or None where it was."""
    name = qualified_class(cls)
    listed = {version: digests[name] for version, digests in proven_digests().items() if name in digests}
    if not listed:
        return f"{name} is not among the layer classes that were proven"
    try:
        found = digest_of(cls)
    except NoSourceError as error:
        return f"{name} has no source that could be compared with the proven one ({error})"
    if found in listed.values():
        return None
    return f"the source of {name}.forward is not the proven one (that of {', '.join(listed)})"


def installed_digests() -> dict[str, dict[str, str]]:
    """The digests of the classes whose recipe is proven, as they are in the packages installed here.

    Classes that cannot be imported here, such as those for another platform, are left out, unless their ``forward`` is
    another class's.
    """
    table: dict[str, dict[str, str]] = {}
    for layer in sorted(PROVEN):
        root, _, short = layer.partition(".models.")
        package = layer.partition(".")[0]
        version = f"{package} {import_module(package).__version__.partition('+')[0]}"
        for source in (layer, f"{root}.models.{INHERITED.get(short, short)}"):
            module, _, name = source.rpartition(".")
            try:
                table.setdefault(version, {})[layer] = digest_of(getattr(import_module(module), name))
            except ImportError:
                continue
            break
    return table


def _methods(cls: type) -> dict[str, ast.AST]:
    """``forward`` and the methods of ``cls`` that it reaches through ``self``, by name, as syntax trees."""
    found: dict[str, ast.AST] = {}
    wanted = ["forward"]
    while wanted:
        name = wanted.pop()
        function = _own_function(cls, name)
        if name in found or function is None:
            continue
        try:
            found[name] = _normalised(inspect.getsource(function))
        except (OSError, SyntaxError) as error:
            raise NoSourceError(str(error)) from None
        wanted += _called_on_self(found[name])
    if "forward" not in found:
        raise NoSourceError("it has no forward of its own")
    return found


def _own_function(cls: type, name: str) -> Any:
    """The function that ``self.name`` is, or None where it is a submodule, a value, or torch's own."""
    for base in cls.__mro__:
        if name in base.__dict__:
            raw = base.__dict__[name]
            function = inspect.unwrap(getattr(raw, "__func__", raw))
            return function if inspect.isfunction(function) and base.__module__.split(".")[0] != "torch" else None
    return None


def _called_on_self(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def _normalised(source: str) -> ast.AST:
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.JoinedStr):
            # Python 3.12 ends a nested format with an empty string.
            node.values = [value for value in node.values if getattr(value, "value", None) != ""]
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # Docstrings, and other statements that are only a string.
            node.body = [  # type: ignore[attr-defined]
                statement
                for statement in body
                if not (isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str))
            ]
    return tree


def _words(node: Any) -> Iterator[str]:
    """A tree as a stream of words. Fields that are empty are left out: newer Pythons add some."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if name in ("ctx", "kind", "type_comment") or value is None or value == []:
                continue
            yield f".{name}"
            yield from _words(value)
        # A constant None is told from nothing by the name of its node.
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _words(item)
        yield "]"
    else:
        yield f"{type(node).__name__} {node!a}"

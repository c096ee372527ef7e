# SPDX-License-Identifier: Apache-2.0
"""Digests of Python source that ignore comments, docstrings, annotations and formatting.

A digest is computed from the syntax tree and does not depend on the platform or the version of Python.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def digest_of_trees(trees: Mapping[str, ast.AST]) -> str:
    """Return the SHA-256, in hex, of normalised syntax trees and their names."""
    digest = hashlib.sha256()
    for name, tree in sorted(trees.items()):
        digest.update(f"{name}\n".encode())
        for token in _tokens(tree):
            # The length separates neighbouring tokens.
            digest.update(f"{len(token)}:{token}\n".encode())
    return digest.hexdigest()


def normalised_source(source: str) -> ast.Module:
    """Return the normalised tree of source text, which may be indented.

    Raises:
        SyntaxError: The text is not Python.
    """
    return normalised(ast.parse(textwrap.dedent(source)))


def normalised_nodes(nodes: Iterable[ast.stmt]) -> ast.Module:
    """Return the normalised tree of statements of another tree, which stays as it is."""
    return normalised(ast.Module([copy.deepcopy(node) for node in nodes], []))


def normalised(tree: ast.Module) -> ast.Module:
    """Remove docstrings and annotations from ``tree``, and return it."""
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
            # Drop docstrings and other statements that are only a string.
            node.body = [  # type: ignore[attr-defined]
                statement
                for statement in body
                if not (isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str))
            ]
    return tree


def names_on_self(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes of ``self`` that a tree refers to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def _tokens(node: Any) -> Iterator[str]:
    """Yield the tokens of a tree, without empty fields: newer versions of Python add some."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if name in ("ctx", "kind", "type_comment") or value is None or value == []:
                continue
            yield f".{name}"
            yield from _tokens(value)
        # The name of its node distinguishes a constant None from an absent field.
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _tokens(item)
        yield "]"
    else:
        yield f"{type(node).__name__} {node!a}"

# SPDX-License-Identifier: Apache-2.0
"""Digests of the source on which each recipe was proven.

A recipe describes what ``forward`` does with the residual stream, so it holds only for the code on which it was proven.
The digest of a class covers its ``forward``, every method of the class that ``forward`` calls, directly or indirectly,
and the same methods of an inner class that contains a hook point. It is computed from the syntax tree: comments,
docstrings, annotations and formatting do not count, nor do the platform and the version of Python. ``digests.json``,
written by ``scripts/digests.py``, lists the digests by package and version.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from vllm_steer.compat.syntax import digest_of_trees, names_on_self, normalised_source
from vllm_steer.models.recipe import qualified_name
from vllm_steer.models.recipes import RECIPES

FILE = "digests.json"


class NoSourceError(Exception):
    """Raised when a class has no Python source to compare."""


def digest_of(cls: type, inner_class: str = "") -> str:
    """Return the SHA-256, in hex, of what ``cls`` does in ``forward``.

    Args:
        cls: A decoder-layer class.
        inner_class: Name of another class in the same module whose ``forward`` counts as well.

    Raises:
        NoSourceError: The source of either class is not available.
    """
    methods = _methods(cls)
    if inner_class:
        inner = getattr(import_module(cls.__module__), inner_class, None)
        if inner is None:
            raise NoSourceError(f"its module has no {inner_class}")
        methods |= {f"{inner_class}.{name}": tree for name, tree in _methods(inner).items()}
    return digest_of_trees(methods)


@cache
def proven_digests() -> Mapping[str, Mapping[str, str]]:
    """Return the digests that the conformance tests ran on: ``{"vllm 0.32.0": {class: digest}}``."""
    table: dict[str, dict[str, str]] = json.loads((files(__package__) / FILE).read_text())
    return table


def why_unproven(cls: type) -> str | None:
    """Return why no recipe was proven on the source of ``cls``, or None if one was."""
    name = qualified_name(cls)
    listed = {version: digests[name] for version, digests in proven_digests().items() if name in digests}
    if not listed:
        return f"the hook points of {name} are not proven in any version"
    try:
        found = digest_of(cls, RECIPES[name].inner_class if name in RECIPES else "")
    except NoSourceError as error:
        return f"the source of {name} cannot be compared with the proven source ({error})"
    if found in listed.values():
        return None
    return f"the source of {name}.forward differs from the proven source; it is proven in {', '.join(listed)}"


def _methods(cls: type) -> dict[str, ast.AST]:
    """Return the syntax trees, by name, of ``forward`` and of the methods that it reaches through ``self``."""
    found: dict[str, ast.AST] = {}
    wanted = ["forward"]
    while wanted:
        name = wanted.pop()
        function = _own_function(cls, name)
        if name in found or function is None:
            continue
        try:
            found[name] = normalised_source(inspect.getsource(function))
        except (OSError, SyntaxError) as error:
            raise NoSourceError(str(error)) from None
        wanted += names_on_self(found[name])
    if "forward" not in found:
        raise NoSourceError("it has no forward of its own")
    return found


def _own_function(cls: type, name: str) -> Any:
    """Return the function ``self.name``, or None for a submodule, a value, or a function of torch."""
    for base in cls.__mro__:
        if name in base.__dict__:
            raw = base.__dict__[name]
            function = inspect.unwrap(getattr(raw, "__func__", raw))
            return function if inspect.isfunction(function) and base.__module__.split(".")[0] != "torch" else None
    return None

# SPDX-License-Identifier: Apache-2.0
"""Tests that the interfaces of peers use the public API only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "vllm_steer" / "peers"
PUBLIC = (
    "vllm_steer",
    "vllm_steer.adapters",
    "vllm_steer.client",
    "vllm_steer.errors",
    "vllm_steer.server.extension",
)
"""Modules whose names adapters may import: those in ``__all__``, or without it all that the module defines."""
OWN = "vllm_steer.peers."


def private_names(source: str) -> Iterator[str]:
    """Yield the names of this project that ``source`` imports and that are not public."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm_steer"]
            yield from (name for name in names if name not in PUBLIC and not name.startswith(OWN))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm_steer":
            module = str(node.module)
            if (module + ".").startswith(OWN):
                continue
            known = _names_of(module) if module in PUBLIC else ()
            yield from (f"{module}.{alias.name}" for alias in node.names if alias.name not in known)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or "")  # write the complete name


def _names_of(module: str) -> list[str]:
    found = import_module(module)
    return list(getattr(found, "__all__", None) or [name for name in vars(found) if name[0] != "_"])


def test_peers_use_the_public_api() -> None:
    """Catches an interface that reaches into this project, so that others could not be written in the same way."""
    found = {path.relative_to(PEERS).as_posix(): {*private_names(path.read_text())} for path in PEERS.rglob("*.py")}
    assert len(found) > 20
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f():\n    from vllm_steer.request import Edit", ["vllm_steer.request.Edit"]),
        ("import vllm_steer.params", ["vllm_steer.params"]),
        ("from vllm_steer import params, Edit", ["vllm_steer.params"]),
        ("from vllm_steer.adapters import shown, np", ["vllm_steer.adapters.np"]),
        ("from vllm_steer.client import responses", ["vllm_steer.client.responses"]),
        ("from ...request import Edit", ["...request"]),
        ("import vllm_steer\nfrom vllm_steer.errors import SteeringError\nfrom vllm_steer.peers.http import x", []),
    ],
)
def test_private_names_are_found(source: str, names: list[str]) -> None:
    """Negative control: finds imports within functions, of modules, of names that are not public, and relative ones."""
    assert list(private_names(source)) == names


def test_public_modules_have_what_they_list() -> None:
    """Catches a name in ``__all__`` of a public module that does not exist."""
    for module in PUBLIC:
        for name in _names_of(module):
            assert hasattr(import_module(module), name), f"{module}.{name}"

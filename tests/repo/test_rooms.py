# SPDX-License-Identifier: Apache-2.0
"""Tests of the order of the package's rooms: imports point down, and offline use loads no web framework."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.rooms import ROOMS
from tests.repo.tree import read

PACKAGE = Path(__file__).parents[2] / "vllm_steer"

EXCEPTIONS: frozenset[tuple[str, str]] = frozenset()
"""Pairs of a module and a module of a higher room that it imports."""

LEVEL = {name: level for level, room in enumerate(reversed(ROOMS)) for name in room.names}


def room_of(module: str) -> str:
    """Return the room of a module, named relative to the package."""
    return module.partition(".")[0]


def imports_of(source: str, modules: set[str]) -> Iterator[str]:
    """Yield the modules of the package that ``source`` imports, also within functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            inside = name.removeprefix("vllm_steer.")
            if inside != name:
                yield inside if inside in modules else inside.rpartition(".")[0] or inside


def upward_imports(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Return the pairs of importing and imported module that violate the order."""
    return {
        (module, imported)
        for module, source in sources.items()
        for imported in imports_of(source, set(sources))
        if room_of(imported) in LEVEL
        and room_of(imported) != room_of(module)
        and LEVEL[room_of(imported)] >= LEVEL[room_of(module)]
    }


def package_sources() -> dict[str, str]:
    """Return the source of each module of the package but ``__init__.py`` at its top."""
    named = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    return {name: path.read_text() for name, path in named.items() if name != "__init__"}


def test_every_room_exists() -> None:
    """Catches a new room without a row, a row for a room that is gone, and a picture that names such a room."""
    rooms = [name for room in ROOMS for name in room.names]
    assert sorted(rooms) == sorted({room_of(name) for name in package_sources()})
    titles = re.findall(r'class="name"[^>]*>([\w, ]*\w)', read("docs/assets/architecture.svg"))
    assert {name for title in titles for name in title.split(", ")} - set(rooms) == set()


def test_imports_point_down() -> None:
    """Catches an import of a higher room, and an exception that is no longer needed."""
    assert upward_imports(package_sources()) == set(EXCEPTIONS)


def test_upward_imports_are_found() -> None:
    """Negative control: finds imports at the top, within functions, and of a package's attribute."""
    sources = {
        "request.edit": "from vllm_steer.engine.worker import Worker",
        "taps.tap": "def f():\n    import vllm_steer.server.flags",
        "engine.worker": "from vllm_steer.compat.version import TESTED\nfrom vllm_steer import errors",
        "models.layers": "from vllm_steer.server import flags",
        "compat.version": "",
        "errors": "",
        "server.flags": "from vllm_steer.request.edit import Edit",
    }
    assert upward_imports(sources) == {
        ("request.edit", "engine.worker"),
        ("taps.tap", "server.flags"),
        ("models.layers", "server.flags"),
    }


@pytest.mark.parametrize("statement", ["import vllm_steer", "from vllm_steer import Edit, SteeringConfig, CaptureSpec"])
def test_import_loads_no_web_framework(statement: str) -> None:
    """Catches an import that makes offline scripts load FastAPI."""
    script = f"{statement}\nimport sys\nprint([n for n in ('fastapi', 'starlette') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

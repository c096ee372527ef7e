# SPDX-License-Identifier: Apache-2.0
"""Tests that only ``compat`` reaches into vLLM, and that names which are missing there are reported."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from vllm_steer.compat import internals
from vllm_steer.compat.seams import Kind, Seam
from vllm_steer.errors import IncompatibleError

PACKAGE = Path(__file__).parents[2] / "vllm_steer"
PUBLIC = frozenset({"__version__"})
"""Names that any module may import from ``vllm`` itself."""
MODULE_NAME = re.compile(r"vllm\.[a-z0-9_]+[\w.:]*")
NAMING = ("compat/", "models/vllm_recipes.py", "models/recipes.py")
"""Modules whose tables name places in vLLM as text."""
LOGGER = "vllm.steering.audit"


def reached(files: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return file and name of each import from vLLM, and of each text that names a place in it, outside of compat."""
    found = set()
    for file, text in files.items():
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
                names = [
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if node.module != "vllm" or alias.name not in PUBLIC
                ]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("vllm.")]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not file.startswith(NAMING):
                names = [node.value] if MODULE_NAME.fullmatch(node.value) and node.value != LOGGER else []
            found |= {(file, name) for name in names if not (file.startswith("compat/") and name == "vllm")}
    return found


def test_only_compat_reaches_into_vllm() -> None:
    """Catches an import of vLLM's insides that the table of seams does not list, so that no release report names it."""
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert reached(files) == set(), "import the name from vllm_steer.compat.internals; add a row to compat/seams.py"


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from vllm.v1.request import Request",
        "import vllm.envs",
        "from vllm import ModelRegistry",
        "import_module('vllm.v1.request')",
        "load('vllm.v1.request:Request')",
    ],
)
def test_a_reach_is_found(source: str) -> None:
    """Negative control: each way to reach a name of vLLM is found outside of compat."""
    assert reached({"engine/a.py": source})
    assert not reached({"engine/a.py": "import vllm\nfrom vllm import __version__\nx = 'vllm serve'"})


def test_a_missing_name_is_reported_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a vLLM that moved or dropped a name and fails with a bare ImportError."""
    module = ModuleType("vllm.old_place")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    seam = Seam("vllm.old_place:Thing", Kind.IMPORT, "a test", moved_to="vllm.no_such_place:Thing")
    monkeypatch.setattr(internals, "_IMPORTED", {"Thing": seam})
    with pytest.raises(IncompatibleError, match=r"no Thing in vllm/no_such_place\.py or in vllm/old_place\.py.*a test"):
        internals.__getattr__("Thing")
    module.Thing = 7  # type: ignore[attr-defined]
    assert internals.__getattr__("Thing") == 7
    with pytest.raises(AttributeError, match="no row of kind IMPORT or WIRE for Other"):
        internals.__getattr__("Other")

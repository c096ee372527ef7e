# SPDX-License-Identifier: Apache-2.0
"""The page of the Python API lists every public name, and the examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

import vllm_steer
import vllm_steer.client
import vllm_steer.params
import vllm_steer.patching
from tests.repo.tree import ROOT, read

NAMES = [name for name in vllm_steer.__all__ if name != "__version__"]
RESULT_TYPES = {"Captures", "StoredRequest", "Readouts", "SteeringTrace"}
"""Types of public results that users do not construct."""
INTERNALS = {
    "to_wire",
    "from_wire",
    "parse",
    "compose",
    "snapshot",
    "is_stale",
    "refresh",
    "beyond",
    "digests",
    "delay",
}
_ENTRY = re.compile(r"^::: ([\w.]+)\n(?:    options:\n      filters: (\[.*\])\n)?", re.MULTILINE)
_ALWAYS_HIDDEN = "!^_[^_]"


def entries() -> list[tuple[str, Any, list[str]]]:
    """Return the path, the object and the filters of each entry of the page."""
    found = []
    for path, filters in _ENTRY.findall(read("docs/reference/api.md")):
        module, _, name = path.rpartition(".")
        found.append((path, getattr(import_module(module), name), ast.literal_eval(filters or f'["{_ALWAYS_HIDDEN}"]')))
    return found


def shown(documented: Any, filters: list[str]) -> Iterator[str]:
    """Yield the names of an entry's members that the page shows."""
    for name, member in vars(documented).items() if inspect.isclass(documented) else ():
        hidden = any(re.search(pattern.removeprefix("!"), name) for pattern in filters)
        if not hidden and (callable(member) or isinstance(member, (property, classmethod, staticmethod))):
            yield name


def docstrings(documented: Any) -> Iterator[str]:
    """Yield the docstrings of an entry, its methods and its attributes."""
    for node in ast.walk(ast.parse(inspect.getsource(documented))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_page_lists_every_public_name() -> None:
    """Catches a public name that the reference omits, and an entry for a name that is not public."""
    listed = [path.rpartition(".")[2] for path, _, _ in entries()]
    names = {*NAMES, *vllm_steer.client.__all__, *vllm_steer.patching.__all__, *RESULT_TYPES}
    assert sorted(listed) == sorted(names)


def test_page_shows_no_internals() -> None:
    """Catches methods of the implementation among those that users call."""
    named = {f"{path}.{name}" for path, each, filters in entries() for name in shown(each, filters)}
    assert not {path for path in named if path.rpartition(".")[2] in INTERNALS}
    assert any(path.endswith("SteeringRegistry.register") for path in named), "the filters hide everything"


def test_docstrings_on_the_page_are_markdown() -> None:
    """Catches markup of Sphinx, and examples outside of a section, which the page shows as they are written."""
    wrong = [
        (path, line)
        for path, documented, _ in entries()
        for text in docstrings(documented)
        for line in text.splitlines()
        if re.search(r":\w+:`|^\s*=+ =|\w::$|^\s*Example:$", line)
    ]
    assert wrong == []


def test_page_shows_the_arguments_of_sampling_params() -> None:
    """Catches optional arguments that the page calls required and without a type.

    The metaclass takes them, so the page reads a declaration beside it.
    """
    (declared,) = (
        node
        for node in ast.walk(ast.parse((ROOT / "vllm_steer/params.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    assert [each.arg for each in declared.args.kwonlyargs] == list(vllm_steer.params.FIELDS)
    assert all(each.annotation for each in declared.args.kwonlyargs)
    assert [ast.unparse(each) for each in declared.args.kw_defaults if each] == ["None"] * len(vllm_steer.params.FIELDS)


def test_dir_lists_names_that_are_imported_on_first_use() -> None:
    """Catches completion in a notebook that shows no public name."""
    assert set(vllm_steer.__all__) <= set(dir(vllm_steer))


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    """Catches a public name without an example, an example that is not valid Python, or one with another result.

    Examples that need an engine or a server are compiled only.
    """
    documented = getattr(vllm_steer, name)
    text = inspect.cleandoc(documented.__doc__)
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples
    for example in test.examples:
        compile(example.source, name, "single")
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(test).failed == 0

# SPDX-License-Identifier: Apache-2.0
"""Helpers: list every architecture of vLLM's registry with the decoder-layer classes that its source refers to.

Nothing is imported or built: starting at the model's class, the names in each class's source are followed through
vLLM's model code, including imports and the registry names by which wrappers select their language model. A wrapper
that leaves the language model to its config refers to none.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import vllm

from vllm_steer.models.recipes import RECIPES, UNSUPPORTED

MODEL_CODE: Final = ("vllm.model_executor.models", "vllm.models")
# Towers, modules that every model imports, and code of other platforms.
NOT_FOLLOWED: Final = ("utils", "interfaces", "interfaces_base", "registry", "adapters", "vision", "config")
NOT_HERE: Final = (".amd", ".xpu")
ROOT: Final = Path(vllm.__file__).parent.parent


@dataclass(frozen=True)
class Entry:
    """One name of the registry.

    ``layers``: the classes with a recipe or a refusal that its source refers to. ``others``: classes that look like
    decoder layers and have neither.
    """

    architecture: str
    module: str
    cls: str
    kind: str
    layers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def inventory() -> list[Entry]:
    """Return all entries in the registry's order, each name once; takes seconds."""
    found: dict[str, Entry] = {}
    for kind, table in tables().items():
        for architecture, place in table.items():
            if architecture not in found:
                found[architecture] = _entry(architecture, *place, kind)
    return list(found.values())


def tables() -> dict[str, dict[str, tuple[str, str]]]:
    """Return vLLM's tables of models by their purpose."""
    from vllm.model_executor.models import registry

    return {
        "text": registry._TEXT_GENERATION_MODELS,
        "transformers": registry._TRANSFORMERS_SUPPORTED_MODELS,
        "multimodal": registry._MULTIMODAL_MODELS,
        "backend": registry._TRANSFORMERS_BACKEND_MODELS,
        "pooling": {
            **registry._EMBEDDING_MODELS, **registry._LATE_INTERACTION_MODELS, **registry._REWARD_MODELS,
            **registry._SEQUENCE_CLASSIFICATION_MODELS, **registry._TOKEN_CLASSIFICATION_MODELS,
        },
        "drafter": registry._SPECULATIVE_DECODING_MODELS,
    }  # fmt: skip


def _entry(architecture: str, module: str, cls: str, kind: str) -> Entry:
    name = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
    if kind in ("pooling", "drafter", "backend", "transformers"):
        return Entry(architecture, name, cls, kind)
    reached = {f"{module}.{cls}" for module, cls in _reached(name, cls)}
    known = sorted(name for name in reached if name in RECIPES or name in UNSUPPORTED)
    others = sorted(name for name in reached if name.endswith("DecoderLayer") and name not in known)
    return Entry(architecture, name, cls, kind, tuple(known), tuple(others))


def _reached(module: str, cls: str) -> Iterator[tuple[str, str]]:
    """Yield every class that the source of a class refers to, by module and name."""
    todo, seen = [(module, cls)], set()
    while todo:
        place = _definition(*todo.pop())
        if place is None or place in seen:
            continue
        seen.add(place)
        yield place
        if (name := f"{place[0]}.{place[1]}") in RECIPES or name in UNSUPPORTED:
            continue
        here = _parsed(place[0])
        for name in _names(here.classes[place[1]]) | _in_tables(here, place[1]):
            todo += [(place[0], name)]
            if name in _registered():
                found = _registered()[name]
                todo += [(found[0] if found[0].startswith("vllm.") else f"{MODEL_CODE[0]}.{found[0]}", found[1])]


@dataclass(frozen=True)
class Parsed:
    """The classes, the imported names and the tables (dicts of a module) of one source file."""

    classes: Mapping[str, ast.ClassDef]
    imports: Mapping[str, tuple[str, str]]
    tables: Mapping[str, ast.Dict]


def _definition(module: str, name: str) -> tuple[str, str] | None:
    """Return where a name is defined, following imports; None if it is not a class in vLLM's model code."""
    for _ in range(5):
        if not module.startswith(MODEL_CODE) or module.rsplit(".", 1)[1] in NOT_FOLLOWED:
            return None
        if any(platform in module for platform in NOT_HERE):
            return None
        parsed = _parsed(module)
        if name in parsed.classes:
            return module, name
        if name not in parsed.imports:
            return None
        module, name = parsed.imports[name]
    return None


@functools.cache
def _parsed(module: str) -> Parsed:
    base = ROOT.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.exists():
        return Parsed({}, {}, {})
    tree = ast.parse(path.read_text())
    package = module.split(".") if base.is_dir() else module.split(".")[:-1]
    imports = {}
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                # The first of several platforms counts; NVIDIA's comes first.
                if not any(platform in source for platform in NOT_HERE):
                    imports.setdefault(alias.asname or alias.name, (source, alias.name))
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    dicts = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return Parsed(found, imports, dicts)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements within it, but no expressions, which are most of a file's nodes."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            yield from _statements(each)


def _in_tables(parsed: Parsed, cls: str) -> set[str]:
    """Return the names in those dicts of the module that a class uses."""
    used = _names(parsed.classes[cls]) & parsed.tables.keys()
    return {name for table in used for name in _names(parsed.tables[table])}


@functools.cache
def _names(tree: ast.AST) -> frozenset[str]:
    """Return names, and strings that may be names of the registry."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return frozenset(names)


@functools.cache
def _registered() -> dict[str, tuple[str, str]]:
    return {**tables()["text"], **tables()["multimodal"]}

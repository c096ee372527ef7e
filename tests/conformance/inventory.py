# SPDX-License-Identifier: Apache-2.0
"""Every architecture of vLLM's registry, and which decoder-layer classes its source can come to.

Nothing is imported or built: from the model's class on, the names in each class's source are followed through vLLM's
own model code, imports included, and so are the registry's names by which wrappers ask for their language model. A
wrapper that leaves that to the config alone comes to none.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import vllm

from vllm_steer.models.recipes import RECIPES
from vllm_steer.models.unsupported import UNSUPPORTED

MODEL_CODE: Final = ("vllm.model_executor.models", "vllm.models")
# Towers and what every model imports; other platforms' code.
NOT_FOLLOWED: Final = ("utils", "interfaces", "interfaces_base", "registry", "adapters", "vision", "config")
NOT_HERE: Final = (".amd", ".xpu")
ROOT: Final = Path(vllm.__file__).parent.parent


@dataclass(frozen=True)
class Entry:
    """One name of the registry. ``layers``: the classes that its source comes to and that have a recipe or a refusal.

    ``others``: classes that look like decoder layers and have neither.
    """

    architecture: str
    module: str
    cls: str
    kind: str
    layers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def inventory() -> list[Entry]:
    """All of it, in the registry's order, each name once; parsing takes seconds."""
    found: dict[str, Entry] = {}
    for kind, table in tables().items():
        for architecture, place in table.items():
            if architecture not in found:
                found[architecture] = _entry(architecture, *place, kind)
    return list(found.values())


def tables() -> dict[str, dict[str, tuple[str, str]]]:
    """vLLM's own tables, by what their models are for."""
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
    """Every class that the source of one comes to, by module and name."""
    todo, seen = [(module, cls)], set()
    while todo:
        place = _definition(*todo.pop())
        if place is None or place in seen:
            continue
        seen.add(place)
        yield place
        if f"{place[0]}.{place[1]}" in {*RECIPES, *UNSUPPORTED}:
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
    """Where a name of a module is defined, through imports; None if not as a class in vLLM's model code."""
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
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                # Of the same name from several platforms, the first counts: NVIDIA's comes first or alone.
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


def _in_tables(parsed: Parsed, cls: str) -> set[str]:
    """Names in the module's dicts that a class uses."""
    used = _names(parsed.classes[cls]) & parsed.tables.keys()
    return {name for table in used for name in _names(parsed.tables[table])}


def _names(tree: ast.AST) -> set[str]:
    """Names, and strings that may be names of the registry."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


@functools.cache
def _registered() -> dict[str, tuple[str, str]]:
    return {**tables()["text"], **tables()["multimodal"]}

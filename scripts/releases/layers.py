# SPDX-License-Identifier: Apache-2.0
"""Decoder-layer classes in the source of a version of vLLM, compared with the proven ones."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_steer.compat.sources import Function, SourceTree
from vllm_steer.compat.syntax import digest_of_trees, names_on_self, normalised_nodes
from vllm_steer.models.digests import proven_digests
from vllm_steer.models.recipes import RECIPES, UNSUPPORTED

MODEL_CODE = ("vllm.model_executor.models", "vllm.models")
_SUFFIX = "DecoderLayer"


@dataclass(frozen=True)
class LayerChange:
    """A decoder-layer class that differs between two versions.

    Attributes:
        name: Qualified name.
        state: ``new``, ``changed`` or ``gone``.
        recipe: The class whose recipe applies, or an empty string.
        note: Whether the class is refused or proven, or what is to do.
    """

    name: str
    state: str
    recipe: str = ""
    note: str = ""


def digest_of_layer(tree: SourceTree, name: str, inner_class: str = "") -> str | None:
    """Return the digest of a class as :func:`vllm_steer.models.digests.digest_of` does, without importing it.

    None if the class does not exist in ``tree`` or has no ``forward`` there.
    """
    module, _, cls = name.rpartition(".")
    methods = _methods(tree, f"{module}:{cls}")
    if "forward" not in methods:
        return None
    if inner_class:
        methods |= {f"{inner_class}.{name}": found for name, found in _methods(tree, f"{module}:{inner_class}").items()}
    return digest_of_trees(methods)


def layer_changes(old: SourceTree, new: SourceTree) -> list[LayerChange]:
    """Return the decoder-layer classes of vLLM that are new, changed or gone in ``new``."""
    before, after = _digests(old), _digests(new)
    found = []
    for name in sorted(before | after):
        if before.get(name) == after.get(name):
            continue
        state = "gone" if name not in after else "new" if name not in before else "changed"
        recipe = "" if state == "gone" else _recipe(new, name)
        found.append(LayerChange(name, state, recipe, _note(name, after.get(name), recipe)))
    return found


def _note(name: str, digest: str | None, recipe: str) -> str:
    if name in UNSUPPORTED:
        return "refused"
    versions = [version for version, digests in proven_digests().items() if digest and digests.get(name) == digest]
    if versions:
        return f"proven with {versions[-1]}"
    if digest is None:
        return ""
    return "prove again" if recipe == name else "add a recipe and prove it"


def _recipe(tree: SourceTree, name: str) -> str:
    """Return the nearest class with a recipe whose ``forward`` a class runs, or an empty string."""
    module, _, cls = name.rpartition(".")
    for base in (base.replace(":", ".") for base in tree.lineage(f"{module}:{cls}")):
        if base in RECIPES:
            return base
        if tree.find(base[::-1].replace(".", ":", 1)[::-1] + ".forward") is None or _defines_forward(tree, base):
            return ""
    return ""


def _defines_forward(tree: SourceTree, name: str) -> bool:
    module, _, cls = name.rpartition(".")
    found = tree.find(f"{module}:{cls}")
    nodes = found.nodes[0].body if found and found.nodes and isinstance(found.nodes[0], ast.ClassDef) else []
    return any(isinstance(node, Function) and node.name == "forward" for node in nodes)


def _digests(tree: SourceTree) -> dict[str, str]:
    """Return the digests of all decoder-layer classes: those with a recipe or a refusal, and those named like one."""
    named = (name for name in (*RECIPES, *UNSUPPORTED) if name.startswith("vllm."))
    found = {}
    for name in sorted({*named, *_named_like_layers(tree)}):
        recipe = RECIPES.get(name)
        digest = digest_of_layer(tree, name, recipe.inner_class if recipe else "")
        if digest is not None:
            found[name] = digest
    return found


def _named_like_layers(tree: SourceTree) -> Iterator[str]:
    for package in MODEL_CODE:
        for module in tree.modules(package):
            parsed = tree.module(module)
            for name, nodes in parsed.bindings.items() if parsed else ():
                if name.endswith(_SUFFIX) and isinstance(nodes[0], ast.ClassDef):
                    yield f"{module}.{name}"


def _methods(tree: SourceTree, path: str) -> dict[str, ast.AST]:
    """Return the trees of ``forward`` and of the methods that it reaches through ``self``."""
    found: dict[str, ast.AST] = {}
    wanted = ["forward"]
    while wanted:
        name = wanted.pop()
        place = tree.find(f"{path}.{name}")
        if name in found or place is None:
            continue
        node = place.nodes[-1] if place.nodes else None
        if not isinstance(node, Function) or any(_is_property(each) for each in node.decorator_list):
            continue
        found[name] = normalised_nodes([node])
        wanted += names_on_self(found[name])
    return found


def _is_property(decorator: ast.expr) -> bool:
    name = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
    return name.endswith("property") or name in ("setter", "getter")

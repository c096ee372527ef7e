# SPDX-License-Identifier: Apache-2.0
"""Signature and digest of each seam in the versions of vLLM that were compared, and comparison with another version."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from vllm_steer.compat.seams import SEAMS, Seam
from vllm_steer.compat.sources import Definition, Function, SourceTree
from vllm_steer.compat.syntax import digest_of_trees, normalised_nodes

FILE = "seams.json"
_DIGITS = 16


@dataclass(frozen=True)
class SeamSource:
    """The source of a seam in one version.

    Attributes:
        signature: Arguments of a function or of a class's ``__init__``; empty for other names.
        digest: Digest of the parts that matter for the kind of the seam.
        text: These parts, formatted; not recorded.
    """

    signature: str
    digest: str
    text: str = ""


@dataclass(frozen=True)
class Change:
    """A seam that differs between two versions; ``old`` or ``new`` is None where it does not exist."""

    seam: Seam
    old: SeamSource | None
    new: SeamSource | None

    @property
    def summary(self) -> str:
        """What changed, in a few words."""
        if self.new is None:
            return "gone"
        if self.old is None:
            return "new"
        return "signature" if self.old.signature != self.new.signature else "source"


def read_seam(tree: SourceTree, seam: Seam) -> SeamSource | None:
    """Return the source of a seam in one version, or None if the version does not have it.

    A class counts with its bases, its fields and the signature of its ``__init__``; the methods that matter are seams
    of their own. A function counts as a whole.
    """
    found = next(filter(None, map(tree.find, seam.places)), None)
    if found is None:
        return None
    nodes = _relevant(found)
    text = "\n".join(ast.unparse(node) for node in nodes)
    digest = digest_of_trees({"": normalised_nodes(nodes)})[:_DIGITS] if nodes else ""
    return SeamSource(_signature(found), digest, text)


def read_seams(tree: SourceTree) -> dict[str, SeamSource | None]:
    """Return the source of all seams in one version, by path."""
    return {seam.path: read_seam(tree, seam) for seam in SEAMS}


def changes(old: Mapping[str, SeamSource | None], new: Mapping[str, SeamSource | None]) -> list[Change]:
    """Return the seams that differ, in the order of the table. Annotations, comments and docstrings do not count."""
    return [
        Change(seam, old.get(seam.path), new.get(seam.path))
        for seam in {seam.path: seam for seam in SEAMS}.values()
        if recorded_parts(old.get(seam.path)) != recorded_parts(new.get(seam.path))
    ]


@cache
def recorded() -> Mapping[str, Mapping[str, SeamSource | None]]:
    """Return the recorded versions, each with its seams by path."""
    variants: dict[str, list[dict[str, str | list[str]]]] = json.loads((files(__package__) / FILE).read_text())
    found: dict[str, dict[str, SeamSource | None]] = {}
    for path, each in variants.items():
        for variant in each:
            source = SeamSource(str(variant["signature"]), str(variant["digest"])) if "digest" in variant else None
            for version in variant["versions"]:
                found.setdefault(version, {})[path] = source
    return found


def recorded_parts(source: SeamSource | None) -> tuple[str, str] | None:
    """Return the signature and the digest of a seam, by which two versions are compared."""
    return None if source is None else (source.signature, source.digest)


def _relevant(found: Definition) -> tuple[ast.stmt, ...]:
    """Return the statements that count: of a class its header and fields, of anything else all."""
    kept: list[ast.stmt] = []
    for node in found.nodes:
        if isinstance(node, ast.ClassDef):
            fields: list[ast.stmt] = [each for each in node.body if isinstance(each, (ast.Assign, ast.AnnAssign))]
            kept.append(ast.ClassDef(node.name, node.bases, node.keywords, fields or [ast.Pass()], node.decorator_list))
        else:
            kept.append(node)
    return tuple(ast.fix_missing_locations(node) for node in kept)


def _signature(found: Definition) -> str:
    for node in found.nodes:
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, Function) and each.name == "__init__":
                    return _arguments(each)
        elif isinstance(node, Function):
            return _arguments(node)
    return ""


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the arguments with their defaults, without annotations."""
    tree = normalised_nodes([function]).body[0]
    return ast.unparse(tree.args) if isinstance(tree, Function) else ""

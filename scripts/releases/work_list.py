# SPDX-License-Identifier: Apache-2.0
"""The work list of a vLLM release: what changed of vLLM that this package depends on."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from scripts.releases.layers import LayerChange, layer_changes
from scripts.releases.settings import SETTINGS
from vllm_steer.compat.seam_digests import Change, SeamSource, changes, read_seams
from vllm_steer.compat.seams import Kind
from vllm_steer.compat.sources import Function, SourceTree

_ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"
_ENVS = "vllm.envs:environment_variables"
_RAISES = ("signature", "gone")


@dataclass(frozen=True)
class SettingChanges:
    """Names that one version has and the other lacks."""

    new: tuple[str, ...]
    gone: tuple[str, ...]

    @classmethod
    def of(cls, old: set[str], new: set[str]) -> SettingChanges:
        """Compare two sets of names."""
        return cls(tuple(sorted(new - old)), tuple(sorted(old - new)))


@dataclass(frozen=True)
class ReleaseDiff:
    """Differences between two versions of vLLM."""

    old: str
    new: str
    num_seams: int
    seams: tuple[Change, ...]
    layers: tuple[LayerChange, ...]
    arguments: SettingChanges
    """Fields of ``EngineArgs``, which are the flags of ``vllm serve``."""
    variables: SettingChanges
    """Environment variables."""


def compare(old: SourceTree, new: SourceTree) -> ReleaseDiff:
    """Compare two versions."""
    before, after = read_seams(old), read_seams(new)
    return ReleaseDiff(
        old.label,
        new.label,
        len(before),
        tuple(changes(before, after)),
        tuple(layer_changes(old, new)),
        SettingChanges.of(_fields(old), _fields(new)),
        SettingChanges.of(_variables(old), _variables(new)),
    )


SEAM_LEGEND: Final = (
    "A *seam* is a part of vLLM that vllm-steer uses. Its kind is `wrap` or `override` for a method that vllm-steer",
    "wraps or overrides, `attribute` for what it reads, sets or calls on an internal object, `wire` for a type that",
    "vLLM sends between processes, and `import` for other names. *Lines* counts the lines of code that were added and",
    "removed; *used by* has the function of vllm-steer, or the purpose where several functions use the seam.",
)
LAYER_LEGEND: Final = (
    "A *recipe* says where in the `forward` of a class the hook points are. Classes without one are refused."
)
PROOF_LEGEND: Final = "A version is supported when these pass with it."


def write_report(diff: ReleaseDiff, *, with_source: bool = False) -> str:
    """Return the report in Markdown.

    Args:
        diff: The comparison.
        with_source: Include the unified diff of every seam.
    """
    return "\n".join(_lines(diff, with_source)).rstrip() + "\n"


def _lines(diff: ReleaseDiff, with_source: bool) -> Iterator[str]:
    first = [change for change in diff.seams if change.summary in _RAISES]
    yield f"# vLLM {diff.old} to {diff.new}"
    yield ""
    yield f"Written by `python scripts/release_diff.py {diff.new} --old {diff.old}` from the source of both versions."
    yield ""
    yield "## Seams"
    yield ""
    yield (
        f"{len(diff.seams)} of {diff.num_seams} seams changed, {len(first)} of them in their signature or by removal. "
        "Comments, docstrings and annotations do not count."
    )
    yield ""
    yield from SEAM_LEGEND
    yield ""
    if diff.seams:
        yield "| seam | kind | change | lines | used by |"
        yield "| --- | --- | --- | --- | --- |"
        for change in sorted(diff.seams, key=lambda change: change.summary not in _RAISES):
            seam = change.seam
            yield f"| `{seam.path}` | {seam.kind.value} | {change.summary} | {_size(change)} | {_user(change)} |"
        yield ""
    for change in first:
        if change.old is not None and change.new is not None:
            yield f"* `{change.seam.path}`: `({change.old.signature})` to `({change.new.signature})`"
        else:
            yield f"* `{change.seam.path}`: {change.summary}"
    yield ""
    yield "## Decoder-layer classes"
    yield ""
    if diff.layers:
        yield LAYER_LEGEND
        yield ""
        yield "| class | state | recipe | status |"
        yield "| --- | --- | --- | --- |"
        for layer in diff.layers:
            yield f"| `{layer.name}` | {layer.state} | {_code(layer.recipe)} | {layer.note} |"
    else:
        yield "None changed."
    yield ""
    yield "## Settings"
    yield ""
    for title, settings in (("Engine arguments", diff.arguments), ("Environment variables", diff.variables)):
        yield f"* {title}, new: {_names(settings.new)}; gone: {_names(settings.gone)}"
    new = (*diff.arguments.new, *diff.variables.new)
    undecided = _names(tuple(name for name in new if name not in SETTINGS))
    yield f"* Without a row in `scripts/releases/settings.py`: {undecided}"
    yield ""
    if any(name in SETTINGS for name in new):
        yield "| new setting | with steering | reason |"
        yield "| --- | --- | --- |"
        for setting in (SETTINGS[name] for name in new if name in SETTINGS):
            yield f"| `{setting.name}` | {setting.verdict.value} | {setting.reason} |"
        yield ""
    yield "## To prove again"
    yield ""
    yield PROOF_LEGEND
    yield ""
    again = [layer for layer in diff.layers if layer.note == "prove again"]
    yield f"* Layer classes: {_names(tuple(layer.name.rpartition('.')[2] for layer in again))} (`make conformance`)"
    yield f"* Tests of the changed seams: {_names(tuple(sorted({_tests(change) for change in diff.seams})))}"
    if with_source:
        for change in diff.seams:
            yield from ("", f"### {change.seam.path}", "", "```diff", *_unified(change), "```")


def _user(change: Change) -> str:
    seam = change.seam
    return _code(seam.ours.removeprefix("vllm_steer.")) if seam.ours else seam.why.replace("|", "\\|")


def _tests(change: Change) -> str:
    """Return the folder of tests of the function that uses a seam."""
    ours = change.seam.ours
    if ours:
        return f"tests/{ours.partition(':')[0].removeprefix('vllm_steer.').partition('.')[0]}"
    return "tests/engine" if change.seam.kind in (Kind.ATTRIBUTE, Kind.WIRE) else "tests/compat"


def _unified(change: Change) -> Iterator[str]:
    yield from difflib.unified_diff(_text(change.old), _text(change.new), "old", "new", lineterm="", n=3)


def _size(change: Change) -> str:
    lines = [line for line in _unified(change) if not line.startswith(("+++", "---"))]
    return f"+{sum(line.startswith('+') for line in lines)} -{sum(line.startswith('-') for line in lines)}"


def _text(source: SeamSource | None) -> list[str]:
    return source.text.splitlines() if source is not None else []


def _code(name: str) -> str:
    return f"`{name}`" if name else ""


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(_code(name) for name in names) or "none"


def _fields(tree: SourceTree) -> set[str]:
    found = tree.find(_ENGINE_ARGS)
    body = found.nodes[0].body if found and found.nodes and isinstance(found.nodes[0], ast.ClassDef) else []
    return {each.target.id for each in body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


def _variables(tree: SourceTree) -> set[str]:
    found = tree.find(_ENVS)
    keys = (
        key
        for node in (found.nodes if found else ())
        if not isinstance(node, Function)
        for each in ast.walk(node)
        if isinstance(each, ast.Dict)
        for key in each.keys
    )
    return {str(key.value) for key in keys if isinstance(key, ast.Constant) and str(key.value).isupper()}

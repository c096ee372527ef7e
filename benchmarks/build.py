# SPDX-License-Identifier: Apache-2.0
"""Digests of the package's code, without comments and docstrings, which results store to identify their code.

Run ``python -m benchmarks.build`` to list the results and the parts of the package that have changed since.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_steer"
RESULTS = ROOT / "benchmarks" / "results"
COMMIT_VARIABLE = "VLLM_STEER_BENCHMARK_COMMIT"
"""Environment variable with the commit of a tree that is not a git repository, such as a copy on a GPU host."""
SPLIT = ("compat", "models", "plugin")
"""Subpackages of which each module also has a digest, because most of their modules do not run in a step."""

_WRAPS = ("compat/wraps.py", "plugin/entry_point.py", "plugin/user_hooks.py")
_INSTALLED = tuple(f"models/{name}.py" for name in ("discovery", "install", "looped_layers", "reduced_norm"))
_STEP = ("taps", "engine", "config", *_WRAPS, *_INSTALLED)
_CAPTURED = (*_STEP, "program", "capture")
_FRONT_END = ("request", "params", "program", "frontend", "plugin/front_end.py", "plugin/request_state.py")
DEPENDS_ON: Mapping[str, tuple[str, ...]] = {
    "idle steps": _STEP,
    "steered steps": (*_STEP, "program"),
    "captured steps": _CAPTURED,
    "requests": _FRONT_END,
    "server": (*_CAPTURED, *_FRONT_END, "server", "metrics"),
    "patching": (*_CAPTURED, *_FRONT_END, "patching"),
    "interfaces of peers": (*_CAPTURED, "frontend", "peers"),
}
"""Parts of the package that each kind of figure depends on. A change in one of them makes a figure out of date."""


def code_lines(source: str) -> str:
    """Return the source without docstrings, other string statements and comment lines.

    The digest covers lines, because syntax trees differ between the Python versions of the development and GPU hosts.
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def digests(package: Path = PACKAGE) -> dict[str, str]:
    """Return a short code digest for each subpackage, each top-level module, and each module of `SPLIT`."""
    parts: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        parts.setdefault(where.parts[0].removesuffix(".py"), []).append(path)
        if where.parts[0] in SPLIT:
            parts[str(where)] = [path]
    return {
        part: hashlib.sha256(
            "\n".join(f"{path.relative_to(package)}\n{code_lines(path.read_text())}" for path in paths).encode()
        ).hexdigest()[:12]
        for part, paths in parts.items()
    }


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the subpackages and top-level modules that were changed, added or removed."""
    parts = {part for part in {*before, *now} if "/" not in part}
    return sorted(part for part in parts if before.get(part) != now.get(part))


def changed_for(kind: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the parts that a kind of figure depends on and that have changed since a result was measured.

    Args:
        kind: A key of `DEPENDS_ON`.
        before: The result's digests. A result without the digest of a module is compared by the module's subpackage.
        now: The digests of the present code.
    """
    parts = (part if part in before else part.partition("/")[0] for part in DEPENDS_ON[kind])
    return sorted({part for part in parts if before.get(part) != now.get(part)})


def joint_digest(kind: str, build: Mapping[str, str]) -> str:
    """Return one digest of the parts that a kind of figure depends on."""
    parts = "\n".join(f"{part} {build.get(part, '')}" for part in DEPENDS_ON[kind])
    return hashlib.sha256(parts.encode()).hexdigest()[:8]


def is_current(kind: str, builds: Iterable[Mapping[str, str]], now: Mapping[str, str]) -> bool:
    """Return whether a figure is of the present code. False for a result that does not record its code."""
    found = list(builds)
    return bool(found) and not any(changed_for(kind, build, now) for build in found)


def commit() -> str | None:
    """Return the commit of the working tree, marked if files differ from it, or None without a repository.

    A commit in `COMMIT_VARIABLE` comes first.
    """
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def identity() -> dict[str, Any]:
    """Return the date and the code of a measurement, which each result stores in its ``environment``."""
    from vllm_steer import __version__

    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "version": __version__, "commit": commit(), "build": digests()
    }  # fmt: skip


def builds_in(result: object) -> list[Mapping[str, str]]:
    """Return every ``build`` entry in a result, at any depth."""
    found: list[Mapping[str, str]] = []
    if isinstance(result, Mapping):
        if isinstance(result.get("build"), Mapping):
            found.append(result["build"])
        result = list(result.values())
    for each in result if isinstance(result, list) else ():
        found += builds_in(each)
    return found


def main() -> None:
    now = digests()
    for path in sorted(RESULTS.glob("*.json")):
        for build in builds_in(json.loads(path.read_text())):
            since = changed(build, now)
            print(f"{path.name:40} {'changed since: ' + ', '.join(since) if since else 'this code'}")


if __name__ == "__main__":
    main()

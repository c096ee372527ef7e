# SPDX-License-Identifier: Apache-2.0
"""Digests of the package's code, without comments and docstrings, which results store to identify their code.

Run ``python -m benchmarks.build`` to list the results and the parts of the package that have changed since.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_steer"
RESULTS = ROOT / "benchmarks" / "results"


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
    """Return a short code digest for each subpackage and each top-level module."""
    parts: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        parts.setdefault(path.relative_to(package).parts[0].removesuffix(".py"), []).append(path)
    return {
        part: hashlib.sha256(
            "\n".join(f"{path.relative_to(package)}\n{code_lines(path.read_text())}" for path in paths).encode()
        ).hexdigest()[:12]
        for part, paths in parts.items()
    }


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the parts that were changed, added or removed."""
    return sorted(part for part in {*before, *now} if before.get(part) != now.get(part))


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

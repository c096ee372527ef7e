# SPDX-License-Identifier: Apache-2.0
"""Which code a result is of: a digest of each part of the package, without its comments and docstrings.

python -m benchmarks.build                      every result that says which code it is of, and what changed since
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


def meaning(source: str) -> str:
    """The lines that run: without docstrings, other texts that stand alone, and lines of comments.

    Not the syntax tree: that of the same code differs between versions of Python, and GPU hosts have another one.
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def digests(package: Path = PACKAGE) -> dict[str, str]:
    """Name of each subpackage, and of each module beside them: a short digest of its code."""
    parts: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        parts.setdefault(path.relative_to(package).parts[0].removesuffix(".py"), []).append(path)
    return {
        part: hashlib.sha256(
            "\n".join(f"{path.relative_to(package)}\n{meaning(path.read_text())}" for path in paths).encode()
        ).hexdigest()[:12]
        for part, paths in parts.items()
    }


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The parts that are others now, or were not there, or are gone."""
    return sorted(part for part in {*then, *now} if then.get(part) != now.get(part))


def builds_in(result: object) -> list[Mapping[str, str]]:
    """Every ``build`` in a result, wherever it stands."""
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

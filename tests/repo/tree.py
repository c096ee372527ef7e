# SPDX-License-Identifier: Apache-2.0
"""The files that belong to the repository: all that git is not told to ignore. Needs no git."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[2]


@cache
def files() -> tuple[Path, ...]:
    """Paths relative to `ROOT`, sorted."""
    return tuple(sorted(walk(ROOT)))


@cache
def python_files(folder: str = ".") -> tuple[Path, ...]:
    """The `.py` files at any depth under `folder`, relative to `ROOT`."""
    return tuple(path for path in files() if path.suffix == ".py" and path.is_relative_to(folder))


def walk(root: Path) -> Iterator[Path]:
    """The files under `root`, relative to it, without those that `.gitignore` or the clone's list names."""
    lists = [path for path in (root / ".gitignore", root / ".git/info/exclude") if path.is_file()]
    ignored = GitIgnoreSpec.from_lines([".git", *(line for path in lists for line in path.read_text().splitlines())])
    for where, folders, names in os.walk(root):
        here = Path(where).relative_to(root)
        folders[:] = [name for name in folders if not ignored.match_file(f"{here / name}/")]
        yield from (here / name for name in names if not ignored.match_file(here / name))


def read(name: str | Path) -> str:
    """The text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")

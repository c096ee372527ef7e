# SPDX-License-Identifier: Apache-2.0
"""The repository's own files: every file that `.gitignore` does not exclude. Does not need git."""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[2]


@cache
def files() -> tuple[Path, ...]:
    """Return the sorted paths of all files, relative to `ROOT`."""
    return tuple(sorted(walk(ROOT)))


@cache
def python_files(folder: str = ".") -> tuple[Path, ...]:
    """Return the `.py` files below `folder`, relative to `ROOT`."""
    return tuple(path for path in files() if path.suffix == ".py" and path.is_relative_to(folder))


def walk(root: Path) -> Iterator[Path]:
    """Yield the files below `root` that neither `.gitignore` nor `.git/info/exclude` excludes."""
    lists = [path for path in (root / ".gitignore", root / ".git/info/exclude") if path.is_file()]
    ignored = GitIgnoreSpec.from_lines([".git", *(line for path in lists for line in path.read_text().splitlines())])
    for folder, subfolders, names in os.walk(root):
        here = Path(folder).relative_to(root)
        subfolders[:] = [name for name in subfolders if not ignored.match_file(f"{here / name}/")]
        yield from (here / name for name in names if not ignored.match_file(here / name))


def read(name: str | Path) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def offenders(paths: Iterable[Path], find: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Return what `find` reports for each path, without the paths for which it reports nothing."""
    return {str(path): found for path in paths if (found := find(path))}


def load_script(name: str) -> ModuleType:
    """Return the module of ``scripts/<name>.py``, which needs no other script."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

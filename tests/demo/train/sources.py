# SPDX-License-Identifier: Apache-2.0
"""Sources of the corpus: the running interpreter's library and pinned, permissively licensed packages.

Packages come through the ordinary `pip download`. One whose metadata does not state a permissive licence is
refused, so the manifest that goes with the model can be trusted.
"""

from __future__ import annotations

import email.parser
import hashlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

Form = Literal["sdist", "wheel"]

# Source distributions where the documentation ships only there, wheels elsewhere.
SDISTS = (
    "Django==5.2", "SQLAlchemy==2.1.9", "nova==34.0.0", "neutron==29.0.0", "cinder==29.0.0", "ironic==39.0.0",
    "swift==2.38.3", "Twisted==26.10.0", "salt==3008.5", "Sphinx==9.0.4", "pyramid==2.1", "celery==5.7.0",
    "Scrapy==2.19.0", "trio==0.35.0", "sympy==1.14.0", "dask==2026.8.0", "pytest==9.2.0",
)  # fmt: skip
WHEELS = (
    "numpy==2.3.5", "scipy==1.17.1", "pandas==3.1.1", "scikit-learn==1.9.1", "statsmodels==0.15.0",
    "astropy==8.0.2", "matplotlib==3.11.2", "networkx==3.6.1", "numba==0.65.0", "transformers==5.19.0",
    "huggingface_hub==2.4.0", "mypy==2.4.1", "Jinja2==3.1.6", "fonttools==4.68.0", "Pygments==2.21.0",
    "rich==15.0.0", "pydantic==2.14.3", "aiohttp==3.14.5", "websockets==17.4", "fastapi==0.136.3",
    "mpmath==1.3.0", "click==8.5.1", "urllib3==2.8.0", "fsspec==2026.9.0",
    "botocore==1.44.5", "google-api-python-client==2.202.0",
)  # fmt: skip
DOCUMENT_SUFFIXES = (".rst", ".md", ".txt", ".inc")
API_SUFFIXES = ("service-2.json.gz", ".json")
# Tests and translations repeat themselves; vendored trees carry other licences than the package's own.
_SKIPPED_FOLDERS = frozenset(
    (
        "test", "tests", "testing", "unit", "functional", "fixtures", "data", "datasets", "static",
        "locale", "locales", "licenses", "lib2to3", "site-packages", "node_modules",
        "vendor", "_vendor", "vendored", "third_party", "extern", "externals", "ext",
    )
)  # fmt: skip
_PERMISSIVE = re.compile(r"apache|\bMIT\b|\bBSD\b|\bPSF\b|python software foundation|\bISC\b", re.IGNORECASE)
_RESTRICTED = re.compile(r"\b[AL]?GPL|\bMPL|mozilla|gnu general|proprietary", re.IGNORECASE)


class CorpusError(RuntimeError):
    """Raised when the corpus cannot be built as described."""


@dataclass(frozen=True)
class Source:
    """One row of the manifest."""

    name: str
    version: str
    licence: str
    form: Form | Literal["stdlib"]
    sha256: str

    def row(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class File:
    """One file of a source: its path within it and its bytes."""

    path: str
    data: bytes


def download(folder: Path) -> list[tuple[Form, Path]]:
    """Download every pinned package that is missing in `folder`, and return all archives in order."""
    folder.mkdir(parents=True, exist_ok=True)
    forms: tuple[tuple[Form, tuple[str, ...]], ...] = (("sdist", SDISTS), ("wheel", WHEELS))
    archives: list[tuple[Form, Path]] = []
    for form, pins in forms:
        for pin in pins:
            found = _find(folder, pin, form)
            if found is None:
                name = pin.partition("==")[0]
                choice = ["--no-binary", name] if form == "sdist" else ["--only-binary", ":all:"]
                pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
                subprocess.run([*pip, *choice, pin], check=True)
                found = _find(folder, pin, form)
            if found is None:
                raise CorpusError(f"pip downloaded {pin}, but no {form} of it is in {folder}")
            archives.append((form, found))
    return archives


def _find(folder: Path, pin: str, form: Form) -> Path | None:
    name, _, version = pin.partition("==")
    stem = re.sub(r"[-_.]+", "_", name).lower() + "-" + version + ("-" if form == "wheel" else ".tar.gz")
    for path in folder.iterdir():
        head, _, tail = path.name.rpartition("-" + version)
        if (re.sub(r"[-_.]+", "_", head).lower() + "-" + version + tail).startswith(stem):
            return path
    return None


def open_archive(form: Form, path: Path) -> tuple[Source, list[File]]:
    """Return the manifest row and the useful files of one downloaded package.

    Raises:
        CorpusError: the package's metadata names no permissive licence.
    """
    files: list[File] = []
    metadata: list[File] = []
    for name, data in _members(form, path):
        if name.endswith(("PKG-INFO", ".dist-info/METADATA")):
            metadata.append(File(name, data))
        elif _useful(PurePosixPath(name)):
            files.append(File(name, data))
    if not metadata:
        raise CorpusError(f"{path.name} has no package metadata")
    header = email.parser.BytesParser().parsebytes(min(metadata, key=lambda file: file.path.count("/")).data)
    classifiers = [row for row in header.get_all("Classifier", []) if row.startswith("License")]
    free_text = str(header["License"] or "").partition("\n")[0]
    stated = [str(row) for row in (header["License-Expression"], *classifiers, free_text) if row]
    licence = next((row for row in stated if _PERMISSIVE.search(row)), "")
    if not licence or any(map(_RESTRICTED.search, stated)):
        raise CorpusError(f"{path.name} states no permissive licence, but {stated}")
    short = licence.rpartition("::")[2].strip()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Source(header["Name"], header["Version"], short, form, digest), files


def _members(form: Form, path: Path) -> Iterator[tuple[str, bytes]]:
    if form == "wheel":
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if _readable(name):
                    yield name, wheel.read(name)
        return
    with tarfile.open(path) as sdist:
        for member in sorted(sdist.getmembers(), key=lambda member: member.name):
            stream = sdist.extractfile(member) if member.isfile() and _readable(member.name) else None
            if stream is not None:
                yield member.name, stream.read()


def _readable(name: str) -> bool:
    return name.endswith((".py", "PKG-INFO", "METADATA", *DOCUMENT_SUFFIXES, *API_SUFFIXES))


def _useful(path: PurePosixPath) -> bool:
    if path.name.endswith("service-2.json.gz") or "discovery_cache" in path.parts:
        return True  # API descriptions: their prose is in the JSON
    if path.suffix == ".json" or _SKIPPED_FOLDERS.intersection(part.lower() for part in path.parts[:-1]):
        return False
    return not path.name.startswith("test_")


def standard_library() -> tuple[Source, list[File]]:
    """Return the running interpreter's standard library, sources only."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = PurePosixPath(path.relative_to(root).as_posix())
        if _useful(relative):
            files.append(File(f"stdlib/{relative}", path.read_bytes()))
    version = sys.version.partition(" ")[0]
    digest = hashlib.sha256(b"".join(file.data for file in files)).hexdigest()
    return Source("CPython standard library", version, "PSF-2.0", "stdlib", digest), files

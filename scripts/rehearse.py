#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rehearse ``pip install vllm-steer`` beside an installed vLLM, from a folder with the wheel as the index.

    python scripts/rehearse.py dist python3.11 python3.12 --log build/rehearsal.txt

For each Python and version of vLLM, an empty environment gets a distribution ``vllm`` of that version without code, and
what vLLM and vllm-steer both require, as pinned for that version. A supported version must then be accepted by
``vllm-steer version``, and an unknown one refused. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from check_wheel import PYTHONS, ROOT, CheckError, exists, run

WORK = ROOT / "build/rehearsal"
SHARED = ("blake3", "cachetools", "msgspec", "numpy", "pydantic", "pyyaml", "safetensors")
"""Requirements of both vLLM and vllm-steer."""
BESIDE = {"0.33.0": "cuda", "0.32.0": "cpu", "0.99.0": "cuda"}
"""Versions of vLLM with the file of ``requirements`` that pins what they require; the last one is unknown."""
UNKNOWN = "0.99.0"
PIP_TIMEOUT_S = 900


def write_stub(folder: Path, version: str) -> None:
    """Write a wheel ``vllm`` that has a version and requirements, and no code."""
    info = f"vllm-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {name}\n" for name in SHARED)
    texts = {
        "vllm/__init__.py": f'__version__ = "{version}"\n',
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: rehearse\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*texts, f"{info}/RECORD"))
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"vllm-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {**texts, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names that are gone or have another value."""
    return sorted(name for name, value in before.items() if after.get(name) != value)


def packages(pip: list[str | Path]) -> dict[str, str]:
    """Return the installed distributions with their versions."""
    lines = run([*pip, "list", "--format=freeze"], "pip list", 120).split()
    return {name: version for name, _, version in (line.partition("==") for line in lines)}


def files(prefix: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file of an environment except bytecode."""
    found = (path for path in prefix.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(prefix)): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def rehearse(python: str, vllm: str, dist: Path, version: str) -> Iterator[str]:
    """Install vllm-steer beside ``vllm`` on one Python, and yield what was seen.

    Raises:
        CheckError: A step failed, or pip changed something that was installed.
    """
    shutil.rmtree(WORK, ignore_errors=True)
    prefix = WORK / "venv"
    run([python, "-m", "venv", prefix], f"{python} -m venv", 120)
    pip: list[str | Path] = [prefix / "bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    quiet = ["install", "--quiet", "--no-cache-dir", "--no-compile", "--progress-bar", "off"]
    write_stub(WORK / "stubs", vllm)
    pins = ROOT / f"requirements/{BESIDE[vllm]}.txt"
    run([*pip, *quiet, "--constraint", pins, *SHARED], "the installation of vLLM's requirements", PIP_TIMEOUT_S)
    stub = [f"vllm=={vllm}", "--no-index", "--find-links", WORK / "stubs"]
    run([*pip, *quiet, *stub], "the installation of the stub", PIP_TIMEOUT_S)
    before, old = packages(pip), files(prefix)
    run([*pip, *quiet, "--find-links", dist, "vllm-steer"], "pip install vllm-steer", PIP_TIMEOUT_S)
    after = packages(pip)
    if after.get("vllm-steer") != version:
        raise CheckError(f"pip installed vllm-steer {after.get('vllm-steer')} instead of {version}")
    if differences := [*changed(before, after), *changed(old, files(prefix))]:
        raise CheckError(f"pip changed {', '.join(differences[:5])}")
    yield f"  added: {', '.join(f'{name} {after[name]}' for name in sorted(after.keys() - before.keys()))}"
    yield f"  {len(before)} packages and {len(old)} files that were there: unchanged"
    yield f"  pip check: {run([*pip, 'check'], 'pip check', 120).strip()}"
    done = subprocess.run([prefix / "bin/vllm-steer", "version"], capture_output=True, text=True, check=False)
    if (done.returncode == 0) == (vllm == UNKNOWN):
        raise CheckError(f"vllm-steer version ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    said = " ".join((done.stderr if done.returncode else done.stdout).split())
    yield f"  vllm-steer version: exit status {done.returncode}: {said[:330]}"
    run([*pip, "uninstall", "--quiet", "--yes", "vllm-steer"], "pip uninstall vllm-steer", 120)
    if left := [name for name in files(prefix) if "vllm_steer" in name or "vllm-steer" in name]:
        raise CheckError(f"pip uninstall left {', '.join(left[:5])}")
    yield "  pip uninstall: no file left"


def main() -> int:
    """Rehearse on each Python; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("dist", type=Path, help="folder with the wheel")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help=f"default: {', '.join(PYTHONS)}, if they exist")
    parser.add_argument("--log", type=Path, help="also write the output to this file")
    options = parser.parse_args()
    (wheel,) = options.dist.glob("vllm_steer-*.whl")
    version = wheel.name.split("-")[1]
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line.replace(str(ROOT), "."))

    failed = 0
    named = options.pythons or [name for name in PYTHONS if exists(name)]
    for python in named:
        for vllm in BESIDE:
            shown = run([python, "--version"], python, 60).strip()
            say(f"{shown}, vLLM {vllm}{' (unknown)' if vllm == UNKNOWN else ''}, {wheel.name}")
            try:
                for line in rehearse(python, vllm, options.dist.resolve(), version):
                    say(line)
            except (CheckError, OSError) as error:
                failed += 1
                say(f"  FAILED: {error}")
    shutil.rmtree(WORK, ignore_errors=True)
    say(f"{len(named) * len(BESIDE) - failed} passed, {failed} failed")
    if options.log:
        options.log.write_text("\n".join(lines) + "\n")
    return 0 if named and not failed else 1


if __name__ == "__main__":
    sys.exit(main())

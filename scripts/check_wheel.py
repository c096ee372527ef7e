#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Install a wheel of vllm-steer into empty environments and run the README's quick start in each.

The pins of vLLM's CPU build, the quick start and its model (`make model`) come from the checkout, the package from the
wheel.
A Python that is missing is skipped, unless it was named. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/wheel"
PINS = ROOT / "requirements/cpu.txt"
PUBLISHED, MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct", ROOT / ".models/SmolLM2-135M-Instruct"
"""The model of the quick start, and its copy in the checkout."""
PYTHONS = ("python3.11", "python3.12", "python3.13")
START_TIMEOUT_S = 900
PIP_TIMEOUT_S = 3600

QUICK_START = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCRIPT = """\
import vllm_steer

if not vllm_steer.__file__.startswith({prefix!r}):
    raise SystemExit(f"vllm_steer comes from {{vllm_steer.__file__}}")

if __name__ == "__main__":
{body}
"""


class CheckError(Exception):
    """One sentence that tells what failed."""


def quick_start(readme: str) -> str:
    """Return the first Python example of the README, with the model in the checkout, for a CPU.

    Args:
        readme: The text of the README.

    Returns:
        The code of the example.

    Raises:
        CheckError: The text has no Python example, or one with another model.
    """
    found = QUICK_START.search(readme)
    if found is None:
        raise CheckError("README.md has no Python example")
    published = f'"{PUBLISHED}", '
    if published not in found[1]:
        raise CheckError(f"README.md's Python example does not use {PUBLISHED}")
    return found[1].replace(published, f'"{MODEL}", enforce_eager=True, ')


def script(code: str, prefix: Path) -> str:
    """Return a script that runs ``code`` as its main part with the package installed below ``prefix``."""
    return SCRIPT.format(prefix=str(prefix), body=textwrap.indent(code, "    "))


def texts(stdout: str) -> list[str]:
    """Return the generated texts of a run, the last line of its output.

    Args:
        stdout: What the quick start printed.

    Returns:
        The texts, which differ in their steering.

    Raises:
        CheckError: The last line is not a list of different texts.
    """
    line = (stdout.strip().splitlines() or [""])[-1]
    try:
        found = ast.literal_eval(line)
    except (SyntaxError, ValueError):
        found = None
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(text, str) for text in found):
        raise CheckError(f"the quick start printed {line!r} instead of several texts")
    if len(set(found)) < len(found):
        raise CheckError(f"steering did not change a text of {found}")
    return found


def run(command: list[str | Path], what: str, timeout: int, **options: object) -> str:
    """Run a command without the caller's Python settings and return its output.

    Args:
        command: The command and its arguments.
        what: What the command does, for the message.
        timeout: Seconds after which the command is ended.
        **options: Further arguments of ``subprocess.run``.

    Returns:
        The command's standard output.

    Raises:
        CheckError: The command failed or took too long.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False, **options
        )
    except subprocess.TimeoutExpired:
        raise CheckError(f"{what} took more than {timeout} s") from None
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise CheckError(f"{what} failed with exit status {done.returncode}:\n{tail}")
    return str(done.stdout)


def install(python: Path, wheel: Path) -> str:
    """Install the pins of vLLM's CPU build and the wheel; return the version of torch.

    Where the index has no CPU build of torch for this Python, pip installs the CUDA build, which is imported only with
    CUDA's libraries; they are installed too.
    """
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
    pip += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    run([*pip, "--no-deps", "-r", PINS], "the installation of vLLM", PIP_TIMEOUT_S)
    show = "import importlib.metadata as m; print(m.version('torch'), any('nvidia' in r for r in m.requires('torch')))"
    version, cuda = run([python, "-c", show], "torch's version", 60).split()
    if cuda == "True":
        run([*pip, f"torch=={version}"], "the installation of CUDA's libraries", PIP_TIMEOUT_S)
    run([*pip, wheel], "the installation of the wheel", PIP_TIMEOUT_S)
    return f"{version} (CUDA build)" if cuda == "True" else version


def folder_of(name: str) -> Path:
    """Return the folder of the environment of the Python ``name``."""
    return WORK / name.strip("/").replace("/", "-")


def check(name: str, wheel: Path) -> str:
    """Run the quick start on one Python and return a line that reports it.

    Args:
        name: The Python's command.
        wheel: The wheel.

    Returns:
        The versions of Python and torch, the times, and the texts.

    Raises:
        CheckError: A step failed.
    """
    started = time.monotonic()
    folder = folder_of(name)
    shutil.rmtree(folder, ignore_errors=True)
    prefix = folder / "venv"
    run([name, "-m", "venv", prefix], f"{name} -m venv", 120)
    python = prefix / "bin/python"
    torch = install(python, wheel)
    installed = time.monotonic()
    (folder / "quick_start.py").write_text(script(quick_start((ROOT / "README.md").read_text()), prefix))
    found = texts(run([python, "quick_start.py"], "the quick start", START_TIMEOUT_S, cwd=folder))
    run([prefix / "bin/vllm-steer", "--help"], "vllm-steer --help", 120, cwd=folder)
    version = run([python, "-c", "import platform; print(platform.python_version())"], "python", 60).strip()
    times = f"installed in {installed - started:.0f} s, run in {time.monotonic() - installed:.0f} s"
    return "\n  ".join([f"Python {version}, torch {torch}: {times}", *(repr(text[:60]) for text in found)])


def exists(name: str) -> bool:
    """Return whether the command ``name`` runs a Python with the venv module."""
    if shutil.which(name) is None:
        return False
    done = subprocess.run([name, "-c", "import ensurepip, venv"], capture_output=True, check=False)
    return done.returncode == 0


def main() -> int:
    """Check the wheel on each Python; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "pythons", nargs="*", metavar="PYTHON", help=f"default: those of {', '.join(PYTHONS)} that exist"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments in build/wheel")
    options = parser.parse_args()
    if not options.wheel.is_file():
        parser.error(f"{options.wheel} is missing; build it with make dist")
    passed = failed = 0
    for name in options.pythons or PYTHONS:
        if not exists(name) and not options.pythons:
            print(f"{name}: skipped, was not found", flush=True)
            continue
        try:
            print(f"{name}: {check(name, options.wheel.resolve())}", flush=True)
            passed += 1
        except (CheckError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed += 1
        if not options.keep:
            shutil.rmtree(folder_of(name), ignore_errors=True)
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())

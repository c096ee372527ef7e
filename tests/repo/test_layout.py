# SPDX-License-Identifier: Apache-2.0
"""Files that a fresh clone must have, and rules for every file."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, files, offenders, python_files, read, walk
from vllm_steer._version import __version__

SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_LINES = 450

REQUIRED_FILES = (
    ".ci/run",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "demo/run.py",
    "deploy/Dockerfile",
    "mkdocs.yml",
    "pyproject.toml",
    "requirements/cpu.txt",
    "requirements/cuda.txt",
    "requirements/dev.txt",
    "requirements/dist.txt",
    "requirements/docs.txt",
    "requirements/vllm-metadata/pyproject.toml",
    "scripts/setup.sh",
)
SCRIPTS = (".ci/run", "scripts/setup.sh")

# Absolute paths of one machine, and hosts of a private network.
MACHINE_PATH = re.compile(r"(?<![\w.~)}/-])/(?:root|work|mnt|home/\w+|Users/\w+|opt/\w+)/")
URL_HOST = re.compile(r"\bhttps?://(?:[^\s/@\"'<>]*@)?([^\s/:\"'<>`)\]},$\\]+)")
PUBLIC_HOSTS = {
    "127.0.0.1",
    "arxiv.org",
    "docs.vllm.ai",
    "download.pytorch.org",
    "example.com",
    "github.com",
    "arrow.apache.org",
    "huggingface.co",
    "keepachangelog.com",
    "semver.org",
    "vllm-project.github.io",
    "www.apache.org",
    "www.w3.org",
}


def licence_and_size_faults(text: str) -> list[str]:
    """Return the faults of a Python source: no SPDX line at the top, or too many lines."""
    lines = text.splitlines()
    first = lines[1] if lines and lines[0].startswith("#!") else next(iter(lines), "")
    faults = [] if first == SPDX else ["no SPDX line at the top"]
    return faults + ([f"{len(lines)} lines"] if len(lines) > MAX_LINES else [])


def private_words(text: str) -> list[str]:
    """Return the absolute paths and the hosts in `text` that exist only on one machine or network."""
    hosts = (host.rstrip(".") for host in URL_HOST.findall(text))
    named = [host for host in hosts if "." in host]  # a single word is a placeholder, as in http://server
    return MACHINE_PATH.findall(text) + [host for host in named if host not in PUBLIC_HOSTS]


def is_text(path: Path) -> bool:
    return b"\0" not in (ROOT / path).read_bytes()[:8192]


def test_required_files_are_tracked() -> None:
    """Catches a file that is missing, or that `.gitignore` excludes from every clone."""
    assert [name for name in REQUIRED_FILES if Path(name) not in files()] == []


def test_walk_skips_ignored_files(tmp_path: Path) -> None:
    """Catches a walk that finds nothing, or that includes an environment's files."""
    for name in ("kept.py", "deep/kept.py", ".venv/lib/other.py", "kept.pyc", ".git/info/HEAD", "mine/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text(".venv/\n*.pyc\n")
    (tmp_path / ".git/info/exclude").write_text("/mine/\n")
    assert sorted(map(str, walk(tmp_path))) == [".gitignore", "deep/kept.py", "kept.py"]


def test_shell_scripts_are_executable_and_parse() -> None:
    """Catches a script without its executable bit or with a syntax error."""
    for name in SCRIPTS:
        assert os.access(ROOT / name, os.X_OK), name
        subprocess.run(["bash", "-n", ROOT / name], check=True)


def test_python_files_have_a_licence_line_and_a_limited_size() -> None:
    """Catches a file without the SPDX line, and a file that holds more than one concept."""
    assert offenders(python_files(), lambda path: licence_and_size_faults(read(path))) == {}


@pytest.mark.parametrize("text", ["", "import os\n", f"#!/bin/sh\n\n{SPDX}\n", f"{SPDX}\n" * (MAX_LINES + 1)])
def test_licence_and_size_faults_are_found(text: str) -> None:
    """Catches a check that accepts every file."""
    assert licence_and_size_faults(text)


def test_no_private_paths_and_hosts() -> None:
    """Catches an absolute path or a host that exists only on its author's machine."""
    assert offenders(filter(is_text, files()), lambda path: private_words(read(path))) == {}


@pytest.mark.parametrize(
    "text",
    [
        "cd /ro" + "ot/x",
        "'/wo" + "rk/main'",
        "path=/ho" + "me/me/x",
        "htt" + "ps://pip.corp/simple",
        "htt" + "p://10.0.0.1:80",
    ],
)
def test_private_words_are_found(text: str) -> None:
    """Catches a search that never finds anything."""
    assert private_words(text)


@pytest.mark.parametrize("text", ["v1/worker/gpu", "https://github.com/x", "a/work/b", "http://localhost:8000/v1"])
def test_public_words_pass(text: str) -> None:
    """Catches a search that forbids relative paths and public hosts."""
    assert not private_words(text)


def test_changelog_has_this_version() -> None:
    """Catches a release without an entry in the change log."""
    assert f"## [{__version__}]" in read("CHANGELOG.md")


def test_ci_runs_the_documented_test_command() -> None:
    """Catches a `.ci/run` that passes while the test command of the README fails."""
    section = read("README.md").split("## Development", 1)[1].split("\n## ", 1)[0]
    commands = re.findall(r"^(make test\b.*)$", section, re.MULTILINE)
    stages = re.findall(r"^stage [\w-]+ (.+)$", read(".ci/run"), re.MULTILINE)
    assert commands == ["make test"]
    assert commands[0] in stages


def test_licence_is_complete() -> None:
    """Catches a licence file that is truncated or holds another licence."""
    text = read("LICENSE")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text

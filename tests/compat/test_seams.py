# SPDX-License-Identifier: Apache-2.0
"""Tests that the table of seams lists what the package uses of vLLM, and nothing else."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest

from tests.compat.usage import INTERNALS, attributes_of_base, foreign_private_attributes, imported, sources
from vllm_steer.compat.seam_digests import read_seams, recorded
from vllm_steer.compat.seams import SEAMS, Kind, Seam
from vllm_steer.compat.sources import installed_source, installed_version

FILES = sources()
ATTRIBUTES = {seam.path.rpartition(".")[2] for seam in SEAMS if seam.kind is not Kind.IMPORT}
QUOTED = {name for seam in SEAMS for name in re.findall(r"`(\w+)`", seam.why)}
OF_OTHERS = {
    "_C", "_disabled_torch_function_impl", "_ensure_server_started", "_fields", "_init_base_url", "_modules",
    "_patching_runner", "_register_fake", "_replace", "_resolve_config", "_value", "_version", "_vllm_steer",
}  # fmt: skip
"""Attributes of ast, torch, dataclasses, inspect_ai and of ours that vLLM does not define."""

BASES = (
    ("engine/scheduler.py", "SteeringSchedulerMixin", "vllm.v1.core.sched.scheduler:Scheduler"),
    ("engine/runner_v1.py", "SteeringRunnerV1", "vllm.v1.worker.gpu_model_runner:GPUModelRunner"),
    ("engine/runner_v2.py", "SteeringRunnerV2", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"),
    ("engine/runner_v2.py", "SteeringModelState", "vllm.v1.worker.gpu.model_states.interface:ModelState"),
    ("engine/worker.py", "SteeringWorker", "vllm.v1.worker.gpu_worker:Worker"),
    ("engine/executor.py", "SteeringExecutor", "vllm.v1.executor.multiproc_executor:MultiprocExecutor"),
    ("plugin/request_state.py", "SteeredRequestState", "vllm.v1.engine.output_processor:RequestState"),
)


def test_lists_every_import_of_vllm() -> None:
    """Catches an import that the next release may break without a word, and a row whose import is gone."""
    listed = {name_of(seam) for seam in SEAMS if seam.kind in (Kind.IMPORT, Kind.WIRE)}
    used = imported(FILES)
    missing = {name: sorted(used[name]) for name in used if name not in listed}
    assert missing == {}, "add rows to vllm_steer/compat/seams.py, then run scripts/seams.py for each version"
    assert {name_of(seam) for seam in SEAMS if seam.kind is Kind.IMPORT} - used.keys() == set()


def name_of(seam: Seam) -> str:
    """Return the name under which a seam is imported, ``module:`` for a module."""
    return seam.path.rpartition(":")[2] or seam.path


def test_classes_of_ours_have_every_abstract_method() -> None:
    """Catches a method that a version of vLLM requires of its subclasses: objects of ours could not be created."""
    checked = 0
    for file, text in FILES.items():
        if "# type: ignore[misc]" not in text:
            continue
        name = "vllm_steer." + ".".join(file.removesuffix(".py").split("/"))
        classes = [cls for _, cls in inspect.getmembers(import_module(name), inspect.isclass) if cls.__module__ == name]
        checked += len(classes)
        for cls in classes:
            missing = getattr(cls, "__abstractmethods__", frozenset())
            of_vllm = {each for each in missing if getattr(cls, each).__module__.startswith("vllm.")}
            assert of_vllm == set(), f"{cls.__qualname__} lacks methods that vLLM requires"
    assert checked > 15


def test_imported_names_are_unique() -> None:
    """Catches two rows with one name, of which only the second can be imported."""
    names = [name_of(seam) for seam in {s.path: s for s in SEAMS if s.kind in (Kind.IMPORT, Kind.WIRE)}.values()]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_lists_every_private_attribute() -> None:
    """Catches a private attribute of vLLM that is used and not listed."""
    used = foreign_private_attributes(FILES)
    missing = {name: sorted(where) for name, where in used.items() if name not in ATTRIBUTES | QUOTED | OF_OTHERS}
    assert missing == {}


@pytest.mark.parametrize(("file", "cls", "base"), BASES, ids=[cls for _, cls, _ in BASES])
def test_lists_the_attributes_of_base_classes(file: str, cls: str, base: str) -> None:
    """Catches an attribute of a base class that a subclass of ours uses and the table lacks."""
    listed = {seam.path.removeprefix(f"{base}.") for seam in SEAMS if seam.path.startswith(f"{base}.")}
    assert attributes_of_base(FILES[file], cls) - listed - {"__dict__"} == set()


def test_listed_attributes_are_used() -> None:
    """Catches a row that nothing uses any more."""
    text = "\n".join(source for file, source in FILES.items() if file != "compat/seams.py")
    names = {seam.path.rpartition(".")[2] for seam in SEAMS if seam.kind is Kind.ATTRIBUTE and ":_" not in seam.path}
    assert {name for name in names if not re.search(rf"[.\"']{name}\b", text)} == set()


def test_each_seam_is_listed_once_with_a_reason() -> None:
    """Catches a row without a reason, and two rows for one use."""
    assert len({(seam.path, seam.kind) for seam in SEAMS}) == len(SEAMS)
    assert [seam.path for seam in SEAMS if not seam.why] == []
    assert [seam.path for seam in SEAMS if (seam.kind in (Kind.WRAP, Kind.OVERRIDE)) != bool(seam.ours)] == []


def test_the_record_is_that_of_the_installed_version() -> None:
    """Catches a seam that this vLLM lacks or changed, and a table that was edited without scripts/seams.py."""
    found = {
        path: source and (source.signature, source.digest) for path, source in read_seams(installed_source()).items()
    }
    assert [path for path, source in found.items() if source is None] == []
    record = recorded()[installed_version()]
    assert {path: source and (source.signature, source.digest) for path, source in record.items()} == found


def test_usage_is_found() -> None:
    """Negative control: finds imports within functions, private attributes, and attributes of a base class."""
    files = {
        "a.py": f"def f(x):\n    from {INTERNALS} import Request\n    import vllm.envs\n"
        "    return x._key, getattr(x, '_named')",
        "b.py": "class C(Base):\n    def __init__(self):\n        self._own = self.theirs\n"
        "    def step(self):\n        super().step()\n        super().other()",
        "c.py": "from vllm_steer.b import C\nclass D(C):\n    def get(self):\n        return self._own, self._vllms",
        "d.py": "from vllm_steer.b import C\ndef get(c):\n    return c._own",
    }
    assert imported(files) == {"Request": {"a.py"}, "vllm.envs:": {"a.py"}}
    assert foreign_private_attributes(files) == {
        "_key": {"a.py"}, "_named": {"a.py"}, "_vllms": {"c.py"}, "_own": {"d.py"},
    }  # fmt: skip
    assert attributes_of_base(files["b.py"], "C") == {"theirs", "other"}

# SPDX-License-Identifier: Apache-2.0
"""Tests of the functions that are installed around methods."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from vllm_steer.compat import wraps
from vllm_steer.compat.wraps import How, Join, install
from vllm_steer.errors import IncompatibleError

calls: list[Any] = []


def first(*args: Any) -> None:
    calls.append(("first", args[1:]))


def second(*args: Any) -> None:
    calls.append(("second", args[1:]))


def double(_target: Any, result: int) -> int:
    return 2 * result


def outer(original: Any, *args: Any, **kwargs: Any) -> Any:
    calls.append("outer")
    return original(*args, **kwargs)


def inner(original: Any, *args: Any, **kwargs: Any) -> Any:
    calls.append("inner")
    return original(*args, **kwargs)


async def later(original: Any, *args: Any) -> Any:
    return await original(*args) + 1


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a class in a module of its own whose methods are wrapped."""

    class Target:
        def method(self, number: int, *, add: int = 0) -> int:
            calls.append("method")
            return number + add

        async def wait(self, number: int) -> int:
            return number

        @staticmethod
        def static(number: int) -> int:
            return number

        @classmethod
        def of_class(cls, number: int) -> int:
            return number

    module: Any = ModuleType("wrapped_module")
    module.Target = Target
    monkeypatch.setitem(sys.modules, "wrapped_module", module)
    calls.clear()
    return Target


def join(method: str, how: How, function: str, **options: Any) -> Join:
    return Join(f"wrapped_module:Target.{method}", how, f"{__name__}:{function}", **options)


def test_runs_functions_in_the_order_given(target: Any) -> None:
    """Catches a later join that runs ahead of an earlier one, and lost arguments."""
    install(
        [
            join("method", How.AFTER, "second"),
            join("method", How.BEFORE, "first"),
            join("method", How.BEFORE, "second"),
            join("method", How.AROUND, "outer"),
            join("method", How.AROUND, "inner"),
            join("method", How.RESULT, "double"),
        ]
    )
    assert target().method(3, add=1) == 8
    assert calls == [("first", (3,)), ("second", (3,)), "outer", "inner", "method", ("second", (3,))]


def test_installs_once(target: Any) -> None:
    """Catches wraps that pile up with every engine of a process."""
    for _ in range(3):
        install([join("method", How.RESULT, "double")])
    assert target().method(3) == 6


def test_joins_take_the_place_of_others_only_if_asked(target: Any) -> None:
    """Catches (1) an engine with steering whose process had one without, and (2) the reverse, with the wrong joins."""
    static = join("static", How.BEFORE, "first", with_object=True)
    install([join("method", How.RESULT, "double"), static], replace=False)
    install([join("method", How.AROUND, "outer"), join("static", How.BEFORE, "second")])
    install([join("method", How.RESULT, "double"), static], replace=False)
    assert (target().method(3), target.static(5)) == (3, 5)
    assert calls == ["outer", "method", ("second", ())]


def test_wraps_coroutines(target: Any) -> None:
    """Catches a wrapper that returns before the coroutine has run."""
    install([join("wait", How.AROUND, "later")])
    assert asyncio.run(target().wait(1)) == 2


def test_keeps_static_and_class_methods(target: Any) -> None:
    """Catches a static method that gets an object, and functions that get the class instead of the argument."""
    install([join("static", How.BEFORE, "first"), join("of_class", How.BEFORE, "second")])
    assert (target.static(1), target().static(2), target.of_class(3)) == (1, 2, 3)
    assert calls == [("first", ()), ("first", ()), ("second", ())]


def test_passes_the_object_to_joins_of_static_methods(target: Any) -> None:
    """Catches a check of a request that does not know its engine."""
    install([join("static", How.BEFORE, "first", with_object=True)])
    assert target().static(5) == 5
    assert calls == [("first", (5,))]


def test_leaves_overrides_and_missing_modules_alone(target: Any) -> None:
    """Catches a wrap of a method that a subclass overrides, and an import of a module that is not in use."""
    method = target.method
    install([join("method", How.OVERRIDE, "first"), Join("no_module:f", How.BEFORE, "x:y", only_if_imported=True)])
    assert target.method is method


@pytest.mark.parametrize("method", ["wrapped_module:Target.gone", "wrapped_module:Gone.method"])
def test_a_missing_method_is_reported_before_anything_is_wrapped(target: Any, method: str) -> None:
    """Catches a KeyError that names no file, and a vLLM of which half is wrapped."""
    with pytest.raises(
        IncompatibleError, match=r"no \S+ in wrapped_module\.py, with which .*:first of vllm-steer runs"
    ):
        install([join("method", How.BEFORE, "first"), Join(method, How.BEFORE, f"{__name__}:first")])
    target().method(1)
    assert calls == ["method"]


def test_modules_are_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a search for the module on each call, which runs for every request and in every step."""
    found: list[str] = []

    def import_once(name: str) -> Any:
        found.append(name)
        return import_module(name)

    monkeypatch.setattr(wraps, "import_module", import_once)
    function = wraps._on_call("math:sqrt")
    assert [function(4), function(9)] == [2, 3]
    assert found == ["math"]

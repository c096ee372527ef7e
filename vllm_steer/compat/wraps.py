# SPDX-License-Identifier: Apache-2.0
"""Install functions of this package before, after and around methods of vLLM."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any

from vllm_steer.errors import IncompatibleError

_MARK = "_vllm_steer_wraps"
"""Attribute of a wrapper: what it replaces, and its joins."""


class How(Enum):
    """How a function of ours joins a method of vLLM."""

    BEFORE = "before"
    """Called ahead of the method with its object and first argument. Its result is ignored; it may raise."""
    AFTER = "after"
    """Called when the method has returned, with its object and first argument. Its result is ignored."""
    RESULT = "result"
    """Called with the method's object and result; returns what the caller gets instead."""
    AROUND = "around"
    """Called instead of the method, with the method and all its arguments."""
    REPLACE = "replace"
    """An object of ours takes the place of the name."""
    OVERRIDE = "override"
    """A method of a subclass that vLLM is configured to use. Nothing is wrapped."""


@dataclass(frozen=True)
class Join:
    """One method of vLLM and the function of ours that joins it. Both are named as ``module:qualified.name``."""

    method: str
    how: How
    runs: str
    only_if_imported: bool = False
    """Skip the method while nothing has imported its module."""
    with_object: bool = False
    """Turn a static method into an ordinary one, so that our function gets the object on which it is called."""

    @property
    def is_wrap(self) -> bool:
        """Whether :func:`install` has anything to do for it."""
        return self.how is not How.OVERRIDE


def file_of(path: str) -> str:
    """Return the file of a module, or of the module in ``module:qualified.name``, relative to the environment."""
    return f"{path.partition(':')[0].replace('.', '/')}.py"


def load(path: str) -> Any:
    """Return the object that ``path``, ``module:qualified.name``, names."""
    module, _, name = path.partition(":")
    return operator.attrgetter(name)(import_module(module))


def install(joins: Iterable[Join], *, replace: bool = True) -> None:
    """Wrap the methods of all ``joins``, each once however often this is called.

    Joins of one method run in the order given. Our functions are imported on their first call, so that a process
    imports only the rooms that it uses.

    Args:
        joins: The methods and functions.
        replace: Whether these joins take the place of other joins of a method. If not, the others stay.

    Raises:
        IncompatibleError: vLLM does not have one of the methods. No method is wrapped then.
    """
    by_method: dict[str, list[Join]] = {}
    for join in joins:
        module = join.method.partition(":")[0]
        if join.is_wrap and (module in sys.modules or not join.only_if_imported):
            by_method.setdefault(join.method, []).append(join)
    owners = {method: _owner(method, of_method[0]) for method, of_method in by_method.items()}
    for method, of_method in by_method.items():
        if of_method[0].how is How.REPLACE:
            setattr(owners[method], method.rpartition(":")[2], load(of_method[0].runs))
            continue
        _wrap(owners[method], method.rpartition(":")[2].rpartition(".")[2], of_method, replace=replace)


def _owner(method: str, join: Join) -> Any:
    """Return the class or module that defines ``method``."""
    module, _, name = method.partition(":")
    owner, _, last = name.rpartition(".")
    try:
        found = load(f"{module}:{owner}") if owner else import_module(module)
        if last in vars(found):
            return found
    except AttributeError:
        pass
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("vllm."):
            raise
    raise IncompatibleError(
        f"this vLLM has no {name} in {file_of(module)}, with which {join.runs} of vllm-steer runs. Install a version "
        "that `vllm-steer version` lists as tested. To run this one without steering, uninstall vllm-steer or leave "
        "`steering` out of VLLM_PLUGINS."
    )


def _wrap(owner: Any, name: str, joins: list[Join], *, replace: bool) -> None:
    """Replace ``owner.name``, unless it has been replaced before. Static and class methods stay what they are."""
    raw = owner.__dict__[name]
    if (wrapped := getattr(getattr(raw, "__func__", raw), _MARK, None)) is not None:
        raw, known = wrapped
        if known == joins or not replace:
            return
    kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    original = raw.__func__ if kind else raw
    call, has_class = original, kind is classmethod
    if kind is staticmethod and any(join.with_object for join in joins):
        call, kind = (lambda _, *args, **kwargs: original(*args, **kwargs)), None
    wrapper = functools.wraps(original)(_joined(call, joins, slice(1, 2) if has_class else slice(2)))
    setattr(wrapper, _MARK, (raw, joins))
    setattr(owner, name, kind(wrapper) if kind else wrapper)


def _joined(call: Callable[..., Any], joins: list[Join], leading: slice) -> Callable[..., Any]:
    """Return ``call`` with ``joins``; functions before and after it get the ``leading`` arguments."""
    before, after, results, around = (
        [_on_call(join.runs) for join in joins if join.how is how]
        for how in (How.BEFORE, How.AFTER, How.RESULT, How.AROUND)
    )
    for function in reversed(around):
        call = functools.partial(function, call)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for function in before:
            function(*args[leading])
        result = call(*args, **kwargs)
        for function in results:
            result = function(args[0], result)
        for function in after:
            function(*args[leading])
        return result

    return wrapper


def _on_call(path: str) -> Callable[..., Any]:
    """Return a function that imports the function at ``path`` when it is called."""
    name_of_module, _, name = path.partition(":")
    get = operator.attrgetter(name)
    module: Any = None

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal module
        if module is None:
            module = import_module(name_of_module)  # on each call it would take longer than most of the functions
        return get(module)(*args, **kwargs)

    return function

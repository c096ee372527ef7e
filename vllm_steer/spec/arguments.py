# SPDX-License-Identifier: Apache-2.0
"""Error messages about misspelt keyword arguments."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from vllm_steer.spec.scalars import did_you_mean

P = ParamSpec("P")
T = TypeVar("T")


def suggest_arguments(aliases: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for functions that users call with keyword arguments.

    An unknown or missing argument then raises a TypeError that suggests the right name and lists the valid ones.

    Args:
        aliases: Names of arguments by names that other interfaces use.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        names = tuple(name for name in signature.parameters if name != "self")

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                try:
                    signature.bind(*args, **kwargs)
                except TypeError:
                    unknown = next((name for name in kwargs if name not in names), None)
                    hint = "" if unknown is None else did_you_mean(unknown, names, aliases)
                    raise TypeError(f"{error}; arguments: {', '.join(names)}{hint}") from None
                raise

        return checked

    return decorate

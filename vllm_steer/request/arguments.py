# SPDX-License-Identifier: Apache-2.0
"""Error messages about misspelt keyword arguments."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from vllm_steer.request.scalars import NO_ALIASES, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")


def describe_arguments(given: Iterable[str], names: Sequence[str], aliases: Mapping[str, str] = NO_ALIASES) -> str:
    """Return the end of a message about the names of arguments: the valid ones, and a suggestion for an unknown one.

    Args:
        given: Names of the keyword arguments of the call.
        names: The valid names.
        aliases: Names of arguments by names that other interfaces use.
    """
    unknown = next((name for name in given if name not in names), None)
    hint = "" if unknown is None else did_you_mean(unknown, names, aliases)
    return f"; arguments: {', '.join(names)}{hint}"


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
                    raise TypeError(f"{error}{describe_arguments(kwargs, names, aliases)}") from None
                raise

        return checked

    return decorate

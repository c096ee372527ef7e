# SPDX-License-Identifier: Apache-2.0
"""Parsers for numbers, names and JSON texts, and error messages: formatting of values, misspelt names and arguments."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Any, ParamSpec, TypeGuard, TypeVar

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_DOSE, MAX_JSON_VALUES

# Edits are computed in float32, where larger numbers become infinity.
FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = float(np.finfo(np.float32).tiny)
"""Smallest float32 number with full precision; some devices round smaller ones to 0."""

_ROUNDED_TO_0 = 2.0**-150
"""Largest number that float32 rounds to 0."""

MASK_HINT = "for a mask, list the numbers of its entries: [i for i, chosen in enumerate(mask) if chosen]"
"""End of error messages about a list with a 0 or 1, or a boolean, for each token."""

Name = TypeVar("Name", bound=str)
P = ParamSpec("P")
T = TypeVar("T")

NO_ALIASES: Mapping[str, str] = MappingProxyType({})
_MAX_COMPARED_CHARS = 64


def shown(value: object) -> str:
    """Return a short one-line representation of any object."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # a failing __repr__, or an integer with more digits than CPython prints
        return f"<{type(value).__name__}>"


def shown_name(name: str) -> str:
    """Return a name that a client chose as a part of an error's path."""
    return shown(name).strip("'") or "''"


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is a Python or numpy integer and not a boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def read_number(value: Any, field: str) -> float:
    """Return a Python or numpy number as a float.

    Raises:
        SteeringError: ``value`` is not a number or is not finite in float32.
    """
    if not (is_integer(value) or isinstance(value, (float, np.floating))):
        hint = "; convert it with float()" if hasattr(value, "item") else ""
        raise SteeringError(field, f"must be a number, not {shown(value)} ({type(value).__name__}){hint}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:  # also true for NaN
        raise SteeringError(field, f"must be finite and at most {FLOAT32_MAX:.3g} (float32), not {shown(value)}")
    return number


def zero_if_underflows(strength: float) -> float:
    """Return a strength, or 0 if float32 rounds it to 0."""
    return strength if abs(strength) > _ROUNDED_TO_0 else 0.0


def read_dose(value: Any, field: str) -> float:
    """Return a dose; raise SteeringError if it is not a number, or leaves nothing of the stream in the row."""
    dose = read_number(value, field)
    if abs(dose) > MAX_DOSE:
        problem = f"a dose must be between {-MAX_DOSE} and {MAX_DOSE}, not {shown(value)}"
        raise SteeringError(field, f"{problem}; beyond, rounding loses the stream. Doses near 0.5 are usual")
    return dose


def read_integer(value: Any, low: int, high: int, field: str, what: str = "") -> int:
    """Return a Python or numpy integer as an int; raise SteeringError if it is not ``low`` to ``high``."""
    if not is_integer(value) or not low <= value <= high:
        raise SteeringError(field, f"must be {what}{low} to {high}, not {shown(value)}")
    return int(value)


def read_flag(value: object, field: str) -> bool:
    """Return a boolean; raise SteeringError for anything else."""
    if not isinstance(value, bool):
        raise SteeringError(field, f"must be true or false, not {shown(value)} ({type(value).__name__})")
    return value


def closest(name: object, names: Iterable[str]) -> str | None:
    """Return the most similar of ``names`` if ``name`` could be a misspelling of it."""
    if not isinstance(name, str) or len(name) > _MAX_COMPARED_CHARS:  # comparing takes quadratic time
        return None
    by_lower_case = {each.lower(): each for each in names}
    return by_lower_case.get(next(iter(difflib.get_close_matches(name.lower(), by_lower_case, 1, 0.75)), ""))


def did_you_mean(name: object, names: Iterable[str], aliases: Mapping[str, str] = NO_ALIASES) -> str:
    """Return the end of an error message about an unknown name: a suggestion, or nothing.

    Args:
        name: Any object, given as a name.
        names: The valid names.
        aliases: Valid names by names that other interfaces use.
    """
    meant = (aliases.get(name) if isinstance(name, str) else None) or closest(name, names)
    return f"; did you mean {meant}?" if meant else ""


def read_choice(
    value: object,
    names: Iterable[Name],
    field: str,
    *,
    what: str = "valid",
    aliases: Mapping[Any, str] = NO_ALIASES,
) -> Name:
    """Return the name that equals ``value``.

    Args:
        value: Any object.
        names: The valid names.
        field: Path of the value, for errors.
        what: What the names are, for errors: "valid" or a noun with its article.
        aliases: Valid names by names that other interfaces use, for errors.

    Raises:
        SteeringError: ``value`` is not one of the names.
    """
    known = tuple(names)
    if isinstance(value, str) and value in known:
        return known[known.index(value)]  # the plain string, even if `value` is a member of a str enum
    name = aliases.get(value if isinstance(value, str) else shown(value))
    hint = f"it is {name} here; " if name else ""
    similar = "" if name else did_you_mean(value, known)
    raise SteeringError(field, f"{shown(value)} is not {what}; {hint}use one of {', '.join(known)}{similar}")


def refuse_repeated(items: Sequence[object], field: str, what: str = "position") -> None:
    """Raise SteeringError if a list names a position twice, as a list with a 0 or 1 for each token does.

    Args:
        items: Positions and other items, which are not compared.
        field: Path of the list, for errors.
        what: What the integers are, for errors.
    """
    # Lists of integers only, which can be long, need no check of each item.
    integers = items if set(map(type, items)) == {int} else [item for item in items if is_integer(item)]
    if len(set(integers)) == len(integers):
        return
    if set(integers) <= {0, 1}:
        raise SteeringError(field, f"{shown(list(items))} repeats {what}s; {MASK_HINT}")
    seen: set[object] = set()
    for i, item in enumerate(items):
        if is_integer(item) and item in seen:
            raise SteeringError(f"{field}[{i}]", f"repeats {what} {shown(item)}; name each {what} once")
        seen.update((item,) if is_integer(item) else ())


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


def parse_json(text: str | bytes, field: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        SteeringError: For ``field``, if the text is not valid JSON, repeats a key in an object, has a text that is not
            Unicode, has more objects, lists and texts than `MAX_JSON_VALUES`, or has nesting or numbers beyond the
            parser's limits.
    """
    try:
        # The parser itself would decode halves of surrogate pairs.
        text = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
        # Before parsing: short keys and small lists take thirty times as much memory as their text.
        if (count := text.count("[") + text.count("{") + text.count('"') // 2) > MAX_JSON_VALUES:
            raise ValueError(f"it has {count} objects, lists and texts, and at most {MAX_JSON_VALUES} are read")
        parsed = json.loads(text, object_pairs_hook=_object)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except UnicodeEncodeError:
        raise SteeringError(field, "has a text with half of a surrogate pair (\\ud800 to \\udfff); remove it") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = str(error).partition(";")[0]  # the rest is advice to Python programmers
        raise SteeringError(field, f"cannot be parsed as JSON: {reason[:200]}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicate = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"duplicate key {shown(duplicate)} in an object")
    return parsed

# SPDX-License-Identifier: Apache-2.0
"""Readers of single values, and how a value is shown in an error sentence."""

import math
import reprlib
from collections.abc import Iterable
from typing import Any, TypeGuard, TypeVar

import numpy as np

from vllm_steer.errors import SteeringError

# The device computes in float32: a number beyond this would arrive there as infinity.
FLOAT32_MAX = float(np.finfo(np.float32).max)

Name = TypeVar("Name", bound=str)


def shown(value: object) -> str:
    """A short, one-line form of ``value``, whatever it is."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # a foreign __repr__, or an integer of more digits than CPython will print
        return f"<{type(value).__name__}>"


def is_integer(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a Python or numpy integer; booleans are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def read_number(value: Any, field: str) -> float:
    """``value`` as a float that stays finite in float32; Python and numpy numbers only."""
    if not (is_integer(value) or isinstance(value, (float, np.floating))):
        raise SteeringError(field, f"must be a number, not {shown(value)} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:  # false for NaN too
        raise SteeringError(field, f"must be finite and at most {FLOAT32_MAX:.3g} (float32), not {shown(value)}")
    return number


def read_choice(value: object, names: Iterable[Name], field: str) -> Name:
    """The one of ``names`` that equals ``value``."""
    known = tuple(names)
    if isinstance(value, str) and value in known:
        return known[known.index(value)]  # the plain string, also where `value` is a str enum
    raise SteeringError(field, f"{shown(value)} is not known; use one of {', '.join(known)}")

# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised for invalid requests and an unsuitable vLLM, and the remedy for a package that is missing."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path
from typing import Literal


class SteeringError(ValueError):
    """A request that cannot be served exactly as specified.

    Attributes:
        field: Path of the invalid value, e.g. ``steering[2].tokens[1]``.
        problem: What is wrong with the value and what is allowed.

    Examples:
        >>> from vllm_steer import Selector, SteeringError
        >>> try:
        ...     Selector([1.5])
        ... except SteeringError as error:
        ...     print(error.field)
        tokens[0]
    """

    field: str
    problem: str

    def __init__(self, field: str, problem: str) -> None:
        """Create an error; ``str(error)`` is ``"field: problem"``."""
        # Both are passed to the base class, so that the error can be pickled.
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class IncompatibleError(ValueError):
    """The version or the settings of vLLM do not support steering.

    Examples:
        >>> from vllm_steer import LLM, IncompatibleError  # doctest: +SKIP
        >>> try:  # doctest: +SKIP
        ...     llm = LLM("demo/model", enable_steering=True)
        ... except IncompatibleError as error:
        ...     print(error)
    """


Extra = Literal["cuda", "cpu", "database", "patching", "lab", "ray", "vllm-lens", "gguf"]
"""Extras in ``pyproject.toml`` that messages name."""


def install_hint(extra: Extra, alternative: str = "") -> str:
    """Return how to install an extra. Releases are on no package index, so the command needs the checkout.

    Args:
        extra: The extra.
        alternative: Another command in the same place, with punctuation around it.
    """
    return f'run `pip install ".[{extra}]"`{alternative} in the root of the vllm-steer checkout'


def warn_caller(message: str) -> None:
    """Warn with the line of the nearest caller outside this package."""
    frame, level, package = inspect.currentframe(), 1, f"{Path(__file__).parent}{os.sep}"
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)

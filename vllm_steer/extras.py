# SPDX-License-Identifier: Apache-2.0
"""Extras of this package, for error messages about a package that is not installed."""

from __future__ import annotations

from typing import Literal

Extra = Literal["cuda", "cpu", "database", "patching", "lab", "ray", "vllm-lens", "gguf"]
"""Extras in ``pyproject.toml`` that messages name."""


def install_hint(extra: Extra, alternative: str = "") -> str:
    """Return how to install an extra. Releases are on no package index, so the command needs the checkout.

    Args:
        extra: The extra.
        alternative: Another command in the same place, with punctuation around it.
    """
    return f'run `pip install ".[{extra}]"`{alternative} in the root of the vllm-steer checkout'

# SPDX-License-Identifier: Apache-2.0
"""What is said about a module, as opposed to what it does: no part of its digest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.spec.scalars import shown

ABOUT_KEYS: tuple[str, ...] = ("description", "model", "provenance")
MAX_TEXT = 4096
MAX_ENTRIES = 32


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For people to read; nothing is decided by it."""

    description: str = ""
    model: str | None = None
    """The model that the vectors were made for."""
    provenance: dict[str, str] = {}
    """Where they come from: any keys and values."""


def parse_about(given: Mapping[str, Any]) -> About:
    """Read ``description``, ``model`` and ``provenance``; other keys of ``given`` are left alone.

    Raises:
        SteeringError: a text is over 4096 characters or is none, or provenance has over 32 entries or is no mapping.
    """
    description, model, provenance = (given.get(key) for key in ABOUT_KEYS)
    if provenance is None:
        provenance = {}
    if not isinstance(provenance, Mapping) or len(provenance) > MAX_ENTRIES:
        raise SteeringError(
            "provenance", f"must be {{name: text}} of at most {MAX_ENTRIES} entries, not {shown(provenance)}"
        )
    return About(
        description="" if description is None else _text(description, "description"),
        model=None if model is None else _text(model, "model"),
        provenance={_text(k, "provenance"): _text(v, f"provenance.{shown(k)}") for k, v in provenance.items()},
    )


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise SteeringError(field, f"must be a text, not {shown(value)} ({type(value).__name__})")
    if len(value) > MAX_TEXT:
        raise SteeringError(field, f"has {len(value)} characters; {MAX_TEXT} is the most")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SteeringError(field, "holds half of a surrogate pair, which UTF-8 cannot express") from None
    return value

# SPDX-License-Identifier: Apache-2.0
"""Descriptive metadata of a module. It has no effect on requests and is not part of the module's digest."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import FLOAT32_MAX, shown

METADATA_KEYS: tuple[str, ...] = ("description", "model", "provenance")
MAX_TEXT = 4096
MAX_ENTRIES = 32


class ModuleMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a module for human readers."""

    description: str = ""
    model: str | None = None
    """Model that the vectors were computed for."""
    provenance: dict[str, str] = {}
    """Origin of the vectors, as free-form keys and values."""

    @property
    def streams(self) -> dict[int, float]:
        """Median length of the stream by layer, from the JSON object in ``provenance["stream"]``; else empty."""
        return {layer: length for layer, length in self.numbers("stream").items() if 0 < length < math.inf}

    def numbers(self, key: str) -> dict[int, float]:
        """Return the numbers by layer in the JSON object ``provenance[key]``; empty for other texts."""
        try:
            return msgspec.json.decode(self.provenance.get(key, "{}"), type=dict[int, float])
        except msgspec.DecodeError:
            return {}


def encode_numbers(numbers: Mapping[int, float]) -> str:
    """Return numbers by layer as text for the provenance, without NaN and infinity."""
    return json.dumps(
        {str(layer): float(f"{number:.6g}") for layer, number in numbers.items() if math.isfinite(number)}
    )


def parse_metadata(given: Mapping[str, Any]) -> ModuleMetadata:
    """Parse ``description``, ``model`` and ``provenance``; other keys of ``given`` are ignored.

    Raises:
        SteeringError: A value has the wrong type, or exceeds 4096 characters or 32 provenance entries; or a length of
            the stream has no meaning.
    """
    description, model, provenance = (given.get(key) for key in METADATA_KEYS)
    if provenance is None:
        provenance = {}
    if not isinstance(provenance, Mapping) or len(provenance) > MAX_ENTRIES:
        raise SteeringError(
            "provenance", f"must be {{name: text}} with at most {MAX_ENTRIES} entries, not {shown(provenance)}"
        )
    about = ModuleMetadata(
        description="" if description is None else _parse_text(description, "description"),
        model=None if model is None else _parse_text(model, "model"),
        provenance={
            _parse_text(key, "provenance"): _parse_text(text, f"provenance.{shown(key)}")
            for key, text in provenance.items()
        },
    )
    told = about.numbers("stream")
    example = 'write lengths by layer, such as {"12": 48.5}, or omit it'
    if "stream" in about.provenance and not told and about.provenance["stream"].strip() != "{}":
        problem = f"is {shown(about.provenance['stream'])}, not a JSON object of numbers; {example}"
        raise SteeringError("provenance.stream", problem)
    for layer, length in told.items():
        if not (layer >= 0 and 0 < length <= FLOAT32_MAX):
            problem = f"{length:g} is not a length of the stream, which is above 0 and finite; {example}"
            raise SteeringError(f"provenance.stream[{layer}]", problem)
    return about


def _parse_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        hint = "; write the object as a JSON text" if isinstance(value, Mapping) else ""
        raise SteeringError(field, f"must be a string, not {shown(value)} ({type(value).__name__}){hint}")
    if len(value) > MAX_TEXT:
        raise SteeringError(field, f"has {len(value)} characters; at most {MAX_TEXT} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SteeringError(field, "contains an unpaired surrogate, which UTF-8 cannot encode") from None
    return value

# SPDX-License-Identifier: Apache-2.0
"""JSON of strangers: what a parser would pass over is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.spec.scalars import shown


def parse_json(text: str | bytes, field: str) -> Any:
    """The value of a JSON text; raises SteeringError, naming ``field``.

    Refused beside what is no JSON: a key that stands twice in one object, and nesting and numbers without end.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = str(error).partition(";")[0]  # the rest is advice to Python programmers
        raise SteeringError(field, f"cannot be read as JSON: {reason[:200]}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"{shown(twice)} stands twice in one object, and one would be ignored")
    return made

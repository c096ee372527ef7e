# SPDX-License-Identifier: Apache-2.0
"""JSON parsing of untrusted input. Rejects duplicate keys, which ``json`` would silently drop."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_JSON_VALUES
from vllm_steer.request.scalars import shown


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

# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests that middlewares of peers translate."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from typing import Any

from vllm_steer.errors import SteeringError


class ParsedBody:
    """A JSON body, and the keys that one of its objects has twice, of which the value has the last one.

    The translated body has no repeated keys, so the checks that follow cannot see that one was ignored.

    Raises:
        ValueError: The body is not valid JSON.
        RecursionError: It is nested too deeply.
    """

    def __init__(self, body: bytes) -> None:
        self._repeated: list[str] = []
        self.value: Any = json.loads(body, object_pairs_hook=self._object)

    def refuse_repeated(self, fields: Collection[str], *, translated: bool) -> None:
        """Raise SteeringError for a repeated key.

        Args:
            fields: Keys that the translation reads; others may be repeated in bodies that stay as they are.
            translated: Whether the body was translated.
        """
        for name in self._repeated:
            if translated or name in fields:
                raise SteeringError(name, "is in an object of the body twice, and one would be ignored; give it once")

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            self._repeated += [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        return found

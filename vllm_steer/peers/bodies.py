# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests that middlewares of peers translate."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_steer.errors import SteeringError
from vllm_steer.server.auth.current_key import require_field_rights
from vllm_steer.server.http.error_response import error_response


async def refuse_path(app: ASGIApp, scope: Scope, receive: Receive, send: Send, error: SteeringError) -> None:
    """Answer a path that ``app`` does not have with ``error``, after its authentication.

    The application answers with HTTP 404, which is replaced; HTTP 401 and 403 stay.
    """
    replaced = False

    async def send_others(message: Message) -> None:
        nonlocal replaced
        if message["type"] == "http.response.start":
            replaced = message["status"] == HTTPStatus.NOT_FOUND
        if not replaced:
            await send(message)

    await app(scope, receive, send_others)
    if replaced:
        await error_response(error)(scope, receive, send)


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

    def require_rights(self, fields: Mapping[str, str], parents: Collection[str] = ()) -> None:
        """Raise ForbiddenError unless the current key may use the fields of the body, before any of them is read.

        Args:
            fields: Our fields by the keys to which they are translated from.
            parents: Objects of the body that may have the keys, instead of its top level.
        """
        body = self.value
        objects = [body.get(parent) for parent in parents] if parents and isinstance(body, dict) else [body]
        given = [each for each in objects if isinstance(each, dict)]
        require_field_rights(
            ours for theirs, ours in fields.items() if any(each.get(theirs) is not None for each in given)
        )

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

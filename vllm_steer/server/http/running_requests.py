# SPDX-License-Identifier: Apache-2.0
"""Running HTTP requests with steering by the ids that clients know, for the route of live strengths.

A client knows the ``id`` of a response (``cmpl-...``, ``chatcmpl-...``, ``resp_...``), and what it has sent in the
header ``X-Request-Id`` or the field ``request_id``. vLLM derives the engine's ids of prompts and samples from these,
except that its responses route ignores the header.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass, field

from vllm_steer.frontend.live import EndedRequestError, LiveSample, UnknownRequestError

_REMEMBERED = 4096
"""Ended requests whose ids are remembered, to tell them from unknown ones."""
RESPONSES_ROUTE = "/v1/responses"
BATCH_ROUTE = "/v1/chat/completions/batch"
_NUMBERED = (RESPONSES_ROUTE, BATCH_ROUTE)
"""Routes on which vLLM appends ``_0``, ``_1`` and so on to ids: for each run of the model, or each conversation."""
_ID = re.compile(r"(?P<response>cmpl-(?P<cmpl>.*)(?=-\d+$)|chatcmpl-(?P<chat>.*)|.*)", re.DOTALL)
_NUMBER = re.compile(r"_\d+$")


def client_ids(engine_id: str, route: str = "", header_id: str | None = None) -> tuple[str, ...]:
    """Return the ids by which a client knows the request of a prompt.

    Args:
        engine_id: Id of the prompt's request, as vLLM's serving code gave it to the engine.
        route: Path of the route.
        header_id: ``X-Request-Id`` of the request, if the route's ids do not contain it.
    """
    if route in _NUMBERED:
        engine_id = _NUMBER.sub("", engine_id)
    if route == RESPONSES_ROUTE:  # which has no prefix of its own, so the client's id can begin like those of others
        return (engine_id, header_id) if header_id else (engine_id,)
    found = _ID.match(engine_id)
    if found is None:
        return (engine_id,)
    own = found["cmpl"] or found["chat"]
    return (found["response"], own) if own else (found["response"],)


@dataclass(eq=False)
class RunningRequest:
    """The samples of one HTTP request."""

    owner: bytes
    route: str = ""
    header_id: str | None = None
    """See `client_ids`."""
    samples: list[LiveSample] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)


class RunningRequests:
    """Running requests of one API server process, by owner and id. For the event loop's thread only."""

    def __init__(self) -> None:
        self._running: dict[tuple[bytes, str], list[RunningRequest]] = {}
        # Hashes, because clients choose ids of any length.
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def add_sample(self, request: RunningRequest, engine_id: str, sample: LiveSample) -> None:
        """Add a sample that was given to the engine.

        Args:
            request: The sample's HTTP request.
            engine_id: See `client_ids`.
            sample: The sample.
        """
        request.samples.append(sample._replace(number=len(request.samples)))
        for each in client_ids(engine_id, request.route, request.header_id):
            if each not in request.ids:
                request.ids.add(each)
                self._running.setdefault((request.owner, each), []).append(request)

    def remove(self, request: RunningRequest) -> None:
        """Remove a request that has been answered."""
        for each in request.ids:
            key = (request.owner, each)
            self._running[key].remove(request)
            if not self._running[key]:
                del self._running[key]
            ended = _hash(*key)
            self._ended[ended] = None
            self._ended.move_to_end(ended)
        request.ids.clear()
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def samples(self, owner: bytes, request_id: str) -> list[LiveSample]:
        """Return the samples of an owner's running request.

        Raises:
            UnknownRequestError: The owner has no such request with steering, in this process.
            EndedRequestError: The request has ended, or several running requests have the id.
        """
        found = self._running.get((owner, request_id), ())
        if len(found) > 1:
            raise EndedRequestError(
                "request_id", f"{len(found)} running requests have this id; use the id of the response instead"
            )
        if found:
            return list(found[0].samples)
        if _hash(owner, request_id) in self._ended:
            raise EndedRequestError("request_id", "the request has ended; send a new one with another strength")
        raise UnknownRequestError(
            "request_id",
            "no running request with steering has this id; use the id of its response or its X-Request-Id, with the "
            "same API key and API server process",
        )


def _hash(owner: bytes, request_id: str) -> bytes:
    return hashlib.blake2b(owner + request_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()

# SPDX-License-Identifier: Apache-2.0
"""Responses of the server as Python objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_steer.capture.readouts import Readouts, SteeringTrace
from vllm_steer.capture.results import RowAccess, SiteRows, Unreached, raise_unknown_site
from vllm_steer.registry.schema import SteeringApplied


class ServerError(Exception):
    """An error response of the server.

    Examples:
        >>> from vllm_steer import ServerError  # doctest: +SKIP
        >>> try:  # doctest: +SKIP
        ...     client.complete("one", steering_modules=["missing"])
        ... except ServerError as error:
        ...     print(error.status, error.message)
    """

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = "") -> None:
        super().__init__(status, message, param, kind)
        self.status = status
        """HTTP status."""
        self.message = message
        """Message of the server, with the path of the invalid value."""
        self.param = param
        """Path of the invalid value, if there is one."""
        self.kind = kind
        """Name of the error type, such as ``BadRequestError``."""

    def __str__(self) -> str:
        return f"{self.message} (HTTP {self.status})"


Rows = SiteRows
"""Rows of one site, as in `LLM` outputs."""
ReadoutValues = Readouts
"""Values of one readout, as in `LLM` outputs."""
Trace = SteeringTrace
"""Factors of the gated and live edits, as in `LLM` outputs."""


@dataclass(frozen=True, eq=False)
class CaptureAnswer(RowAccess):
    """Report of one consumer for one choice."""

    status: str
    """``ok``, ``partial`` or ``error``."""
    error: str | None
    """Reason for a status other than ``ok``."""
    id: str | None = None
    """Id for `Client.fetch` if the rows were too large for the response."""
    data: Any = None
    """Report of a consumer other than ``memory``."""
    sites: Mapping[tuple[str, int], Rows] = field(default_factory=dict)
    """Rows by point and layer, if they are part of the response."""
    unreached: Unreached = ()
    """Requested positions and ``[start, stop]`` pairs that the request ended before."""

    def _site(self, point: str, layer: int) -> Rows:
        if (point, layer) in self.sites:
            return self.sites[point, layer]
        if self.id is not None:
            raise KeyError("the rows are on the server and not in the response; download them with the client's fetch")
        raise_unknown_site(point, layer, self.sites)


@dataclass(frozen=True, eq=False)
class Choice:
    """One sample."""

    text: str
    finish_reason: str | None
    captures: Mapping[str, CaptureAnswer]
    """Reports by consumer."""
    readouts: Mapping[str, ReadoutValues] = field(default_factory=dict)
    """Readouts by name."""
    trace: Trace | None = None
    """Trace of a request with gated or live edits."""
    stop_reason: int | str | None = None
    """Why generation stopped, if a stop string, a stop token or a readout ended it."""

    @property
    def capture_results(self) -> Mapping[str, CaptureAnswer]:
        """Reports by consumer; equal to `captures`, under the name of ``LLM`` outputs."""
        return self.captures


@dataclass(frozen=True, eq=False)
class Completion:
    """Response of the completions or the chat route.

    Examples:
        >>> answer = client.complete("Once upon a time", max_tokens=16, steering_modules=["calm"])  # doctest: +SKIP
        >>> answer.text, answer.applied  # doctest: +SKIP
    """

    choices: tuple[Choice, ...]
    applied: SteeringApplied | None
    """Steering that was applied to the request; None if there was none."""
    document: Mapping[str, Any]
    """The complete JSON response."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def steering_applied(self) -> SteeringApplied | None:
        """Applied steering; equal to `applied`, under the name of ``LLM`` outputs."""
        return self.applied

    @property
    def capture_results(self) -> Mapping[str, CaptureAnswer]:
        """Reports of the first choice by consumer."""
        return self.choices[0].captures


@dataclass(frozen=True, eq=False)
class Piece:
    """One event of a stream, reduced to its first choice."""

    text: str
    applied: SteeringApplied | None
    """Steering that was applied to the request; set on the first piece, and on a last one with the edits that no token
    reached, if there are any."""
    readouts: Mapping[str, ReadoutValues] = field(default_factory=dict)
    """Values of the tokens since the last piece, without readouts that have no new value."""
    trace: Trace | None = None
    """Trace of a request with gated or live edits, on its last piece."""
    id: str = ""
    """Id of the response, for `Client.set_strength`."""
    captures: Mapping[str, CaptureAnswer] = field(default_factory=dict)
    """Reports by consumer, on a piece without text after the answer; empty on others."""
    finish_reason: str | None = None
    """Reason why generation ended; None on all pieces before the last."""
    stop_reason: int | str | None = None
    """Equal to `Choice.stop_reason`, on the last piece."""

    @property
    def capture_results(self) -> Mapping[str, CaptureAnswer]:
        """Reports by consumer; equal to `captures`."""
        return self.captures

    @property
    def steering_applied(self) -> SteeringApplied | None:
        """Applied steering; equal to `applied`."""
        return self.applied


def parse_error(response: httpx.Response) -> ServerError:
    """Parse an error response whose body has been read."""
    try:
        document = response.json()
        error = document.get("error", document)
        message = error.get("message") or error.get("detail") or str(document)
        return ServerError(response.status_code, message, error.get("param"), str(error.get("type") or ""))
    except (ValueError, AttributeError):
        return ServerError(response.status_code, response.text[:200] or response.reason_phrase)


def parse_completion(document: Mapping[str, Any]) -> Completion:
    """Parse the JSON response of the completions or the chat route."""
    choices = tuple(
        Choice(
            text=choice["text"] if "text" in choice else choice["message"].get("content") or "",
            **_results(choice),
        )
        for choice in document["choices"]
    )
    return Completion(choices, _parse_applied(document), document)


def parse_piece(event: Mapping[str, Any]) -> Piece:
    """Parse one event of a stream.

    Raises:
        ServerError: The event reports an error.
    """
    if "error" in event:
        error = event["error"]
        kind = str(error.get("type") or "")
        raise ServerError(int(error.get("code") or 500), str(error.get("message")), error.get("param"), kind)
    choice: Mapping[str, Any] = next((each for each in event.get("choices", ()) if each.get("index", 0) == 0), {})
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return Piece(text, _parse_applied(event), id=str(event.get("id") or ""), **_results(choice))


def read_capture_file(data: bytes) -> dict[tuple[str, int], Rows]:
    """Read the rows from the bytes of a capture file with one request."""
    import tempfile
    from pathlib import Path

    from vllm_steer.capture.files.reader import open_captures

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "capture.safetensors")
        path.write_bytes(data)
        (request,) = open_captures(path)
        # Copy: the mapped file is about to be deleted.
        return {site: Rows(request.positions(*site).numpy(), request.tensor(*site).clone()) for site in request.sites}


def _parse_applied(document: Mapping[str, Any]) -> SteeringApplied | None:
    applied = document.get("steering_applied")
    return None if applied is None else SteeringApplied.model_validate(applied)


def _results(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return what choices of whole answers and of streams have in common."""
    trace = choice.get("steering_trace")
    return {
        "captures": {name: _parse_capture(each) for name, each in (choice.get("capture_results") or {}).items()},
        "readouts": {name: ReadoutValues.from_json(each) for name, each in (choice.get("readouts") or {}).items()},
        "trace": None if trace is None else Trace.from_json(trace),
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
    }


def _parse_capture(report: Mapping[str, Any]) -> CaptureAnswer:
    sites = {
        (point, int(layer)): Rows.from_json(site)
        for point, layers in report.get("sites", {}).items()
        for layer, site in layers.items()
    }
    unreached = tuple(report.get("unreached", ()))
    return CaptureAnswer(report["status"], report["error"], report.get("id"), report.get("data"), sites, unreached)

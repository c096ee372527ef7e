# SPDX-License-Identifier: Apache-2.0
"""What the server's answers are to the client."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from vllm_steer.registry.schema import SteeringApplied

if TYPE_CHECKING:
    import torch


class ServerError(Exception):
    """The server did not do what it was asked to."""

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = "") -> None:
        super().__init__(status, message, param, kind)
        self.status = status
        """Of HTTP."""
        self.message = message
        """Place and problem, in words."""
        self.param = param
        """Path of the value that is wrong, if one is."""
        self.kind = kind
        """Name of the error, e.g. ``BadRequestError``."""

    def __str__(self) -> str:
        return f"{self.message} (HTTP {self.status})"


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one site."""

    positions: torch.Tensor
    """int64 ``[n]``, ascending."""
    rows: torch.Tensor
    """``[n, hidden]``, or as reduced, on the CPU."""


@dataclass(frozen=True, eq=False)
class CaptureAnswer:
    """What one consumer has reported on one choice."""

    status: str
    """``ok``, ``partial`` or ``error``."""
    error: str | None
    """Why it is not ``ok``."""
    id: str | None = None
    """Under which the rows can be fetched, where they were too large for the answer."""
    data: Any = None
    """What a consumer other than ``memory`` has reported."""
    sites: Mapping[tuple[str, int], Rows] = field(default_factory=dict)
    """By point and layer, where they are part of the answer."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One sample."""

    text: str
    finish_reason: str | None
    captures: Mapping[str, CaptureAnswer]
    """By consumer."""


@dataclass(frozen=True, eq=False)
class Completion:
    """An answer of the completions or the chat route."""

    choices: tuple[Choice, ...]
    applied: SteeringApplied | None
    """What was applied to the request; None where nothing was."""
    document: Mapping[str, Any]
    """The whole answer."""

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True)
class Piece:
    """A piece of a stream, of its first choice."""

    text: str
    applied: SteeringApplied | None
    """On the first piece, what was applied to the request; None where nothing was, and on all others."""


def error_of(response: httpx.Response) -> ServerError:
    """The error that an answer states; its body has been read."""
    try:
        document = response.json()
        error = document.get("error", document)
        message = error.get("message") or error.get("detail") or str(document)
        return ServerError(response.status_code, message, error.get("param"), str(error.get("type") or ""))
    except (ValueError, AttributeError):
        return ServerError(response.status_code, response.text[:200] or response.reason_phrase)


def completion_of(document: Mapping[str, Any]) -> Completion:
    """From the JSON of either route."""
    return Completion(
        choices=tuple(
            Choice(
                text=choice["text"] if "text" in choice else choice["message"].get("content") or "",
                finish_reason=choice.get("finish_reason"),
                captures={name: _capture(each) for name, each in (choice.get("capture_results") or {}).items()},
            )
            for choice in document["choices"]
        ),
        applied=_applied(document),
        document=document,
    )


def piece_of(event: Mapping[str, Any]) -> Piece:
    """From one event of a stream; raises ServerError for one that says that it has failed."""
    if "error" in event:
        error = event["error"]
        raise ServerError(int(error.get("code") or 500), str(error.get("message")), error.get("param"))
    text = ""
    for choice in event.get("choices", ()):
        if choice.get("index", 0) == 0:
            text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return Piece(text, _applied(event))


def sites_of_file(data: bytes) -> dict[tuple[str, int], Rows]:
    """The rows in a capture file of one request."""
    import tempfile
    from pathlib import Path

    from vllm_steer.capture.files.reader import open_captures

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "capture.safetensors")
        path.write_bytes(data)
        (request,) = open_captures(path)
        # Copies: the file that they would be mapped from is about to go.
        return {site: Rows(request.positions(*site).clone(), request.tensor(*site).clone()) for site in request.sites}


def _applied(document: Mapping[str, Any]) -> SteeringApplied | None:
    said = document.get("steering_applied")
    return None if said is None else SteeringApplied.model_validate(said)


def _capture(report: Mapping[str, Any]) -> CaptureAnswer:
    sites = {
        (point, int(layer)): _rows(site)
        for point, layers in report.get("sites", {}).items()
        for layer, site in layers.items()
    }
    return CaptureAnswer(report["status"], report["error"], report.get("id"), report.get("data"), sites)


def _rows(site: Mapping[str, Any]) -> Rows:
    import torch

    data = bytearray(base64.b64decode(site["data"]))
    dtype = getattr(torch, site["dtype"])
    rows = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return Rows(torch.tensor(site["positions"], dtype=torch.int64), rows.reshape(site["shape"]))

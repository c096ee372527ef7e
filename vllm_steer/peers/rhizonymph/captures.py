# SPDX-License-Identifier: Apache-2.0
"""Capture requests of the fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import shown

_ID, _RANGES = "request_id", "ranges"


@dataclass(frozen=True, kw_only=True)
class FilesystemCaptureRequest:
    """A capture of the consumer ``filesystem``.

    Examples:
        >>> from vllm_steer.peers.rhizonymph import FilesystemCaptureRequest
        >>> FilesystemCaptureRequest(request_id="a", hooks={"post_block": [1]}).to_spec()["tag"]
        'a'
    """

    hooks: Mapping[str, Any]
    """Layers by hook point, as a list or as ``{"layers": [...]}``."""
    positions: Any = "last_prompt"
    request_id: str | None = None
    """Name of the request in the files: the ``tag`` of the spec."""
    tag: str | None = None
    """The same; both may be given if they are equal."""
    layout: str | None = None
    """``"per_request"``, ``"packed"`` or ``"sharded"``; the consumer's by default."""

    def to_spec(self) -> dict[str, Any]:
        """Return the capture spec of this project."""
        given = {
            "hooks": self.hooks,
            "positions": self.positions,
            _ID: self.request_id,
            "tag": self.tag,
            "layout": self.layout,
        }
        spec: dict[str, Any] = read_spec(
            {key: value for key, value in given.items() if value is not None}, "capture.filesystem"
        )
        return spec


def read_captures(value: Any) -> Any:
    """Return the field ``capture`` with specs of this project.

    Raises:
        SteeringError: A key of the fork is invalid or not served.
    """
    if not isinstance(value, Mapping):
        return value
    return {name: read_spec(spec, f"capture.{name}") for name, spec in value.items()}


def read_spec(spec: Any, field: str) -> Any:
    """Return one capture spec; raise SteeringError if a key of the fork is invalid or not served."""
    if isinstance(spec, FilesystemCaptureRequest):
        return spec.to_spec()
    if not isinstance(spec, Mapping):
        return spec
    found = dict(spec)
    if _ID in found:
        if found.setdefault("tag", found[_ID]) != found[_ID]:
            raise SteeringError(f"{field}.{_ID}", "is stored as the tag, which is also given; omit one of them")
        del found[_ID]
    if isinstance(found.get("hooks"), Mapping):
        found["hooks"] = {
            point: _read_layers(layers, f"{field}.hooks.{point}") for point, layers in found["hooks"].items()
        }
    return found


def _read_layers(layers: Any, field: str) -> Any:
    if not isinstance(layers, Mapping):
        return layers
    if _RANGES in layers:
        raise SteeringError(f"{field}.{_RANGES}", "is not supported; list the layers")
    if set(layers) != {"layers"}:
        raise SteeringError(field, f'must be a list of layers or {{"layers": [...]}}, not {shown(layers)}')
    return layers["layers"]

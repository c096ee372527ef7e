# SPDX-License-Identifier: Apache-2.0
"""Translation of the fork's request fields to those of this project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_steer.adapters import MAX_EDITS, is_integer, shown
from vllm_steer.errors import SteeringError
from vllm_steer.peers.refusals import NAME, REFUSALS, SERVED_BY_RHIZONYMPH, refuse_names
from vllm_steer.peers.rhizonymph.gates import compile_gates, is_gate
from vllm_steer.peers.rhizonymph.packed import read_hooks, read_table

VECTOR_FIELDS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
"""Vector fields of requests."""
MODULE_FIELDS: Mapping[str, str] = {"vectors": "base", "prefill_vectors": "prefill", "decode_vectors": "decode"}
"""Vector fields of modules and of ``/v1/steering/set`` by the fork's names."""
REFUSED = REFUSALS["rhizonymph"][NAME]
_SITE_KEYS = ("layer", "hook", "dest_position", "source_inline", "alpha")
"""Keys of a patch that are served."""
_NO_SOURCE = {
    "source_run": "runs are not kept; capture the source first and send its row as source_inline, or use "
    "/v1/steering/patch",
    "source_module": "is not supported; send the row as source_inline",
    "source_position": "belongs to source_run; omit it",
    "mask": "is not supported; use steering with kind replace and subspace",
}
_ID, _RANGES = "request_id", "ranges"
FIELDS = ("steering", "capture", *VECTOR_FIELDS, *SERVED_BY_RHIZONYMPH, *REFUSED)
"""Fields that the translation reads; others are passed on."""


def translate_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request in the form of this project; fields that need no translation stay as they are.

    Args:
        given: Values by field, as Python or JSON values.

    Raises:
        SteeringError: A field is invalid or not served.

    Examples:
        >>> from vllm_steer.peers.rhizonymph import translate_fields
        >>> site = {"layer": 3, "hook": "post_block", "dest_position": 2, "source_inline": [1.0, 2.0], "alpha": 0.5}
        >>> translate_fields({"patch": [site]})["steering"][0]["tokens"]
        [2]
    """
    fields = {name: value for name, value in given.items() if value is not None or name not in FIELDS}
    refuse_names(fields, REFUSED)
    if fields.pop("capture_wait", True) is not True:
        raise SteeringError("capture_wait", "must be true; the response waits for the consumers")
    if "capture" in fields:
        fields["capture"] = read_captures(fields["capture"])
    for name in VECTOR_FIELDS:
        if name in fields:
            fields[name] = read_hooks(fields[name], name)
    if "steering_name" in fields:
        name = fields.pop("steering_name")
        if "steering_modules" in fields:
            raise SteeringError("steering_name", "and steering_modules name modules; send one of them")
        fields["steering_modules"] = [name]
    steering = fields.get("steering")
    patches = read_patches(fields.pop("patch", None), fields.pop("patch_vectors", None))
    if isinstance(steering, (list, tuple)) and any(map(is_gate, steering)):
        fields["steering"], readouts = compile_gates(steering)
        if readouts:
            given_readouts = fields.get("readouts") or {}
            if not isinstance(given_readouts, Mapping):
                raise SteeringError("readouts", f"must be an object of readouts by name, not {shown(given_readouts)}")
            fields["readouts"] = {**given_readouts, **readouts}
    if patches:
        edits = fields.get("steering") or []
        if not isinstance(edits, (list, tuple)):
            raise SteeringError("steering", f"must be a list, not {shown(edits)}")
        fields["steering"] = [*edits, *patches]
    return fields


def read_patches(sites: Any, vectors: Any) -> list[dict[str, Any]]:
    """Return the edits of ``patch``.

    Args:
        sites: The field ``patch``.
        vectors: The field ``patch_vectors``, a packed table whose rows sites name by their number.

    Raises:
        SteeringError: A site is invalid or has a source that is not served.
    """
    if sites is None:
        if vectors is not None:
            raise SteeringError("patch_vectors", "has no effect without patch")
        return []
    if not isinstance(sites, (list, tuple)):
        raise SteeringError("patch", f"must be a list of sites, not {shown(sites)}")
    if len(sites) > MAX_EDITS:
        raise SteeringError("patch", f"has {len(sites)} sites; at most {MAX_EDITS} are accepted")
    rows = None if vectors is None else read_table(vectors, "patch_vectors")
    return [_patch(site, rows, f"patch[{i}]") for i, site in enumerate(sites)]


def _patch(site: Any, rows: list[dict[str, Any]] | None, field: str) -> dict[str, Any]:
    served = ", ".join(_SITE_KEYS)
    if not isinstance(site, Mapping):
        raise SteeringError(field, f"must be an object with {served}, not {shown(site)}")
    if unknown := [name for name in site if name not in _SITE_KEYS and name not in _NO_SOURCE]:
        raise SteeringError(field, f"unknown key {shown(unknown[0])}; use {served}")
    for name, advice in _NO_SOURCE.items():
        if site.get(name) is not None:
            raise SteeringError(f"{field}.{name}", advice)
    for name in ("layer", "hook", "dest_position", "source_inline"):
        if site.get(name) is None:
            raise SteeringError(f"{field}.{name}", "is missing")
    if not is_integer(site["dest_position"]):
        raise SteeringError(f"{field}.dest_position", f"must be a position, not {shown(site['dest_position'])}")
    row = site["source_inline"]
    if is_integer(row):
        if rows is None or not 0 <= row < len(rows):
            has = "is missing" if rows is None else f"has {len(rows)} rows"
            raise SteeringError(f"{field}.source_inline", f"is row {shown(row)} of patch_vectors, which {has}")
        row = rows[row]
    return {
        "kind": "replace",
        "point": site["hook"],
        "layers": site["layer"],
        "vector": row,
        "strength": site.get("alpha", 1.0),
        "tokens": [site["dest_position"]],
    }


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

# SPDX-License-Identifier: Apache-2.0
"""Declarative gates of the fork, compiled to edits whose ``when`` names a readout.

A gate applies to generated tokens. The decision about a token takes no extra step: ``this_token`` reads the token that
it edits, and ``next_step`` the token before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.spec.scalars import read_choice, shown

WINDOWS: Mapping[str, str] = {"this_token": "token", "next_step": "previous", "rest_of_request": "latch"}
"""Windows of conditions by scope."""
CONVERSATION = "rest_of_conversation"
NO_CONVERSATION = "requests share no state, because any client could name the id; use rest_of_request"
ATTENUATE = "has no equivalent; add the vector with a negative strength in a gate, or use the kind ablate with when"
READOUT = "rhizonymph_gate_{}"
"""Name of the readout of a gate, by its index."""
_WHEN_KEYS = ("kind", "probe", "threshold", "sharpness")
_CLAMP_BOUNDS = {"low": "low", "high": "high", "min": "low", "max": "high"}


def is_gate(item: Any) -> bool:
    """Return whether an item of the field ``steering`` is a gate of the fork."""
    return isinstance(item, Mapping) and "apply" in item


def compile_gates(items: Sequence[Any], field: str = "steering") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the edits of gates, and the readouts that their conditions name.

    Args:
        items: Gates.
        field: Path of ``items``, for errors.

    Raises:
        SteeringError: A gate is invalid, has a part that is not served, or is mixed with edits of this project.
    """
    edits: list[dict[str, Any]] = []
    readouts: dict[str, Any] = {}
    for i, item in enumerate(items):
        path = f"{field}[{i}]"
        if not is_gate(item):
            raise SteeringError(
                path, "is an edit, and other items are gates (they have apply); send gates or edits, not both"
            )
        _check_keys(item, ("when", "scope", "apply"), path)
        edit = _edit_of(item["apply"], f"{path}.apply")
        window = _window_of(item.get("scope", "this_token"), f"{path}.scope")
        when = item.get("when", {"kind": "always"})
        _check_keys(when, _WHEN_KEYS, f"{path}.when")
        if read_choice(when.get("kind"), ("always", "probe"), f"{path}.when.kind") == "probe":
            name = READOUT.format(i)
            readouts[name] = _readout_of(when.get("probe"), f"{path}.when.probe")
            edit["when"] = {"readout": name, "above": when.get("threshold", 0.0), "window": window}
            if when.get("sharpness") is not None:
                edit["when"]["sharpness"] = when["sharpness"]
        elif len(when) > 1:
            raise SteeringError(f"{path}.when", "has no other keys with the kind always")
        edits.append(edit)
    return edits, readouts


def _window_of(scope: Any, field: str) -> str:
    if scope == CONVERSATION:
        raise SteeringError(field, f"{CONVERSATION} is not supported: {NO_CONVERSATION}")
    return WINDOWS[read_choice(scope, tuple(WINDOWS), field)]


def _edit_of(apply: Any, field: str) -> dict[str, Any]:
    _check_keys(apply, ("kind", "steer", "strength", *_CLAMP_BOUNDS), field)
    if apply.get("kind") == "attenuate":
        raise SteeringError(f"{field}.kind", f"attenuate {ATTENUATE}")
    kind = read_choice(apply.get("kind"), ("add", "clamp"), f"{field}.kind")
    edit = {"kind": kind, **_site_of(apply.get("steer"), f"{field}.steer"), "tokens": "generated"}
    vector = apply["steer"].get("vector")
    if vector is None:
        raise SteeringError(f"{field}.steer.vector", "is missing; names of modules are supported in steering_name only")
    edit["vector"] = vector
    if "strength" in apply:
        edit["strength"] = apply["strength"]
    for name, ours in _CLAMP_BOUNDS.items():
        if name in apply:
            if kind != "clamp":
                raise SteeringError(f"{field}.{name}", "belongs to the kind clamp; omit it")
            edit[ours] = apply[name]
    return edit


def _readout_of(source: Any, field: str) -> dict[str, Any]:
    place = _site_of(source, field)
    probe = source.get("vector", source.get("name"))
    if probe is None:
        raise SteeringError(f"{field}.vector", 'is missing; give the vector, or "name": "module/probe"')
    return {"probe": probe, "point": place["point"], "layer": place["layers"], "positions": "all_generated"}


def _site_of(source: Any, field: str) -> dict[str, Any]:
    if not isinstance(source, Mapping):
        raise SteeringError(field, f'must be {{"hook", "layer", "vector"}}, not {shown(source)}')
    _check_keys(source, ("hook", "layer", "vector", "name"), field)
    for key in ("hook", "layer"):
        if source.get(key) is None:
            raise SteeringError(f"{field}.{key}", "is missing")
    return {"point": source["hook"], "layers": source["layer"]}


def _check_keys(value: Any, known: Sequence[str], field: str) -> None:
    if not isinstance(value, Mapping):
        raise SteeringError(field, f"must be an object with {', '.join(known)}, not {shown(value)}")
    for key in value:
        if key not in known:
            raise SteeringError(field, f"unknown key {shown(key)}; use {', '.join(known)}")

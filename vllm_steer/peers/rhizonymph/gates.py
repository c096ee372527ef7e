# SPDX-License-Identifier: Apache-2.0
"""Declarative gates of the fork, compiled to edits whose ``when`` names a readout.

A gate applies to generated tokens. The decision about a token takes no extra step: ``this_token`` reads the token that
it edits, and ``next_step`` the token before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_steer.adapters import MAX_EDITS, read_choice, shown
from vllm_steer.errors import SteeringError
from vllm_steer.peers.refusals import NAME, REFUSALS
from vllm_steer.peers.rhizonymph.packed import read_hooks

WINDOWS: Mapping[str, str] = {"this_token": "token", "next_step": "previous", "rest_of_request": "latch"}
"""Windows of conditions by scope."""
_SHARPNESS = {"token": 1.0, "previous": 1.0}
"""The fork's sharpness by window, without ``sharpness``; a latch is on or off."""
CONVERSATION = "rest_of_conversation"
NO_CONVERSATION = REFUSALS["rhizonymph"][NAME]["conversation_id"]
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
        added = _edits_of(item["apply"], f"{path}.apply")
        if (scope := item.get("scope", "this_token")) == CONVERSATION:
            raise SteeringError(f"{path}.scope", f"{CONVERSATION} is not supported: {NO_CONVERSATION}")
        window = WINDOWS[read_choice(scope, tuple(WINDOWS), f"{path}.scope")]
        when = item.get("when", {"kind": "always"})
        _check_keys(when, _WHEN_KEYS, f"{path}.when")
        if read_choice(when.get("kind"), ("always", "probe"), f"{path}.when.kind") == "probe":
            name = READOUT.format(i)
            readouts[name] = _readout_of(when.get("probe"), f"{path}.when.probe")
            condition = {"readout": name, "above": when.get("threshold", 0.0), "window": window}
            sharpness = when.get("sharpness", _SHARPNESS.get(window))
            if sharpness is not None:
                condition["sharpness"] = sharpness
            added = [{**edit, "when": condition} for edit in added]
        elif len(when) > 1:
            raise SteeringError(f"{path}.when", "has no other keys with the kind always")
        edits += added
        if len(edits) > MAX_EDITS:
            raise SteeringError(path, f"makes more than {MAX_EDITS} edits of the gates")
    return edits, readouts


def _edits_of(apply: Any, field: str) -> list[dict[str, Any]]:
    _check_keys(apply, ("kind", "steer", "strength", *_CLAMP_BOUNDS), field)
    if apply.get("kind") == "attenuate":
        raise SteeringError(f"{field}.kind", f"attenuate {ATTENUATE}")
    kind = read_choice(apply.get("kind"), ("add", "clamp"), f"{field}.kind")
    settings: dict[str, Any] = {"strength": apply["strength"]} if "strength" in apply else {}
    for name, ours in _CLAMP_BOUNDS.items():
        if name in apply:
            if kind != "clamp":
                raise SteeringError(f"{field}.{name}", "belongs to the kind clamp; omit it")
            settings[ours] = apply[name]
    return [
        {"kind": kind, **source, "tokens": "generated", **settings}
        for source in _sources_of(apply.get("steer"), f"{field}.steer")
    ]


def _readout_of(source: Any, field: str) -> dict[str, Any]:
    if isinstance(source, Mapping) and "kind" not in source and source.get("vector") is None:
        source = {**source, "vector": source.get("name")}  # of a module here
    sources = _sources_of(source, field)
    if len(sources) != 1:
        raise SteeringError(field, f"must have one vector, not {len(sources)}")
    (place,) = sources
    return {
        "probe": place["vector"],
        "point": place["point"],
        "layer": place["layers"],
        "positions": "all_generated",
    }


def _sources_of(source: Any, field: str) -> list[dict[str, Any]]:
    """Return point, layer and vector of each site of a source: an inline table, or one vector."""
    if not isinstance(source, Mapping):
        raise SteeringError(
            field, f'must be {{"kind": "inline", "packed"}} or {{"hook", "layer", "vector"}}, not {shown(source)}'
        )
    if "kind" in source:
        return _inline_of(source, field)
    _check_keys(source, ("hook", "layer", "vector", "name"), field)
    for key in ("hook", "layer", "vector"):
        if source.get(key) is None:
            hint = "; names of modules are supported in steering_name only" if key == "vector" else ""
            raise SteeringError(f"{field}.{key}", f"is missing{hint}")
    return [{"point": source["hook"], "layers": source["layer"], "vector": source["vector"]}]


def _inline_of(source: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    if source["kind"] == "name":
        raise SteeringError(field, "names a vector, and vectors have no names here; send it inline")
    read_choice(source["kind"], ("inline",), f"{field}.kind")
    _check_keys(source, ("kind", "packed"), field)
    hooks = read_hooks(source.get("packed"), f"{field}.packed")
    if not isinstance(hooks, Mapping) or not hooks:
        raise SteeringError(f"{field}.packed", f"must be an object of packed hook points, not {shown(hooks)}")
    found = []
    for point, by_layer in hooks.items():
        if not isinstance(by_layer, Mapping) or not by_layer:
            raise SteeringError(f"{field}.packed.{point}", f"must be a packed hook point, not {shown(by_layer)}")
        for layer, entry in by_layer.items():
            if not isinstance(entry, Mapping) or "scale" not in entry:
                raise SteeringError(
                    f"{field}.packed.{point}", "must be packed, with dtype, shape, layer_indices and data"
                )
            if entry["scale"] != 1.0:
                raise SteeringError(f"{field}.packed.{point}.scales", "are not supported in gates; multiply the rows")
            found.append({"point": point, "layers": int(layer), "vector": entry["vector"]})
    return found


def _check_keys(value: Any, known: Sequence[str], field: str) -> None:
    if not isinstance(value, Mapping):
        raise SteeringError(field, f"must be an object with {', '.join(known)}, not {shown(value)}")
    for key in value:
        if key not in known:
            raise SteeringError(field, f"unknown key {shown(key)}; use {', '.join(known)}")

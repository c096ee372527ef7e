# SPDX-License-Identifier: Apache-2.0
"""A request is admitted: global steering, the modules that it names and its own edits, in this order, as one program.

This happens once for each request, in the front end. From then on the request holds content, and nothing that happens
to the registry can change what it runs with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.params import (
    APPLIED_KEY,
    CAPTURE_KEY,
    EXTRA_KEY,
    MODULES_KEY,
    encode_specs,
    read_references,
    read_specs,
)
from vllm_steer.program import Program, compile_program, join, with_source
from vllm_steer.registry.module import DIGEST_PREFIX
from vllm_steer.registry.snapshot import Snapshot, Use
from vllm_steer.spec import CaptureSpec, NamedProjection, Projection
from vllm_steer.spec.references import MODULES_FIELD, Reference

_MOST_KEPT = 256
_SMALL = 1 << 14
"""Bytes of a request's own up to which it is worth a look whether another brought the same: vectors mostly differ."""


class RequestComposer:
    """Composes programs; keeps those of requests that bring names and few bytes of their own, which are often equal."""

    def __init__(self) -> None:
        self._kept: tuple[Snapshot | None, dict[tuple[bytes | None, ...], dict[str, bytes]]] = (None, {})

    def compose(self, extra: Mapping[str, Any], snapshot: Snapshot) -> Mapping[str, Any]:
        """``extra_args`` as the engine gets them: with the whole program, and what was applied beside it.

        The same object where there is nothing to apply, or where it has been applied before.

        Raises:
            SteeringError: a module is not there, the parts do not go together, or a client has forged one of our keys.
        """
        if APPLIED_KEY in extra:
            if not isinstance(extra[APPLIED_KEY], bytes):
                raise SteeringError(f"extra_args.{APPLIED_KEY}", "is not for clients")
            return extra
        ours = {name: extra[name] for name in (EXTRA_KEY, MODULES_KEY, CAPTURE_KEY) if name in extra}
        if EXTRA_KEY not in ours and MODULES_KEY not in ours and snapshot.steering_digest is None:
            return extra
        rest = {name: value for name, value in extra.items() if name not in ours}
        if not all(isinstance(value, bytes) and len(value) <= _SMALL for value in ours.values()):
            return {**rest, **_composed(ours, snapshot)}
        # Together, so that what is found is of this snapshot, whatever another thread does meanwhile.
        of, kept = self._kept
        if of is not snapshot or len(kept) >= _MOST_KEPT:
            kept = {}
            self._kept = snapshot, kept
        key = tuple(ours.get(name) for name in (EXTRA_KEY, MODULES_KEY, CAPTURE_KEY))
        if key not in kept:
            kept[key] = _composed(ours, snapshot)
        return {**rest, **kept[key]}


def count_edits(extra: Mapping[str, Any], snapshot: Snapshot) -> int:
    """How many edits the modules have that ``extra_args`` name, each as often as it is named, before any is joined.

    Raises:
        SteeringError: a module is not there.
    """
    uses = _found(read_references(extra) or (), snapshot)
    return sum(len(snapshot.content(use.digest).program.edits) for use in uses)


def _composed(ours: Mapping[str, Any], snapshot: Snapshot) -> dict[str, bytes]:
    """What becomes of the keys that are ours."""
    own = None if EXTRA_KEY not in ours else Program.from_bytes(ours[EXTRA_KEY])
    references = read_references(ours)
    uses = _found(references or (), snapshot)
    composed = {key: value for key, value in ours.items() if key != MODULES_KEY}
    if own is not None and references is not None and CAPTURE_KEY in ours:
        specs = with_probes(read_specs(ours), snapshot)
        composed[CAPTURE_KEY] = encode_specs(specs)
        # Its directions are known now: what was a read of whole rows may be one of products.
        paths = [f"capture.{consumer}" for consumer, _ in specs]
        own = join([own.without_reads(), compile_program([], [spec for _, spec in specs], capture_paths=paths)])
        composed[EXTRA_KEY] = own.encode_cached()
    if uses or snapshot.steering_digest is not None:
        modules = [with_source(snapshot.program(use), f"{MODULES_FIELD}[{i}]") for i, use in enumerate(uses)]
        steering = snapshot.steering_program
        everyone = [] if steering is None else [with_source(steering, "global steering")]
        composed[EXTRA_KEY] = join([*everyone, *modules, *([] if own is None else [own])]).encode_cached()
    if uses or snapshot.steering_digest is not None or (own is not None and own.edits):
        composed[APPLIED_KEY] = _applied(snapshot, uses, own)
    return composed


def _found(references: tuple[Reference, ...], snapshot: Snapshot) -> tuple[Use, ...]:
    return tuple(snapshot.find(each, f"{MODULES_FIELD}[{i}]")[0] for i, each in enumerate(references))


def with_probes(specs: tuple[tuple[str, CaptureSpec], ...], snapshot: Snapshot) -> tuple[tuple[str, CaptureSpec], ...]:
    """``specs`` with the directions of named probes in the place of their names; raises SteeringError."""
    return tuple(
        (consumer, spec.with_reduce(_directions(spec.reduce, snapshot, f"capture.{consumer}.reduce.probes")))
        if isinstance(spec.reduce, NamedProjection)
        else (consumer, spec)
        for consumer, spec in specs
    )


def _directions(named: NamedProjection, snapshot: Snapshot, field: str) -> Projection:
    directions = []
    for i, probe in enumerate(named.probes):
        use, _ = snapshot.find(probe.module, f"{field}[{i}]")
        probes = snapshot.content(use.digest).probes
        if probe.probe not in probes:
            there = ", ".join(probes) or "none"
            raise SteeringError(f"{field}[{i}]", f"{probe.module} has no probe {probe.probe}; it has {there}")
        directions.append(probes[probe.probe])
    return Projection(directions, field)


def _applied(snapshot: Snapshot, uses: tuple[Use, ...], own: Program | None) -> bytes:
    """As JSON of a `SteeringApplied`: it is made for every request, and mostly read for none."""
    return msgspec.json.encode(
        {
            "epoch": snapshot.epoch,
            "global": snapshot.steering_digest,
            "modules": uses,
            "request": None if own is None or not own.edits else _digest(own),
        }
    )


def _digest(program: Program) -> str:
    """Of a program's edits: their steps name vectors by content."""
    return DIGEST_PREFIX + hashlib.sha256(msgspec.msgpack.encode(program.edits)).hexdigest()

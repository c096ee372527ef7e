# SPDX-License-Identifier: Apache-2.0
"""Composition of a request's program from global steering, the modules that it names and its own edits, in this order.

The front end composes each request once, at admission. The result contains the content of the modules, so later
changes of the registry do not affect the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.models.sae_features import FeatureReader
from vllm_steer.params import (
    APPLIED_KEY,
    CAPTURE_KEY,
    MODULES_KEY,
    PROGRAM_KEY,
    REPORT_KEY,
    encode_specs,
    read_references,
    read_specs,
)
from vllm_steer.program import Program, compile_program, join, with_source
from vllm_steer.program.bind import bind_names
from vllm_steer.program.feature import FeatureVectors, SaeSite
from vllm_steer.registry.directions import Direction, Directions
from vllm_steer.registry.index import ResolvedModule
from vllm_steer.registry.module import DIGEST_PREFIX
from vllm_steer.registry.snapshot import Snapshot, refuse_dosed_digest
from vllm_steer.request import CaptureSpec, NamedProjection, Projection, Vector
from vllm_steer.request.probe import Probe
from vllm_steer.request.references import (
    GLOBAL_SOURCE,
    MODULES_FIELD,
    ProbeReference,
    Reference,
    parse_probe,
    parse_reference,
)
from vllm_steer.request.scalars import shown

_COMPOSED_KEYS = (PROGRAM_KEY, MODULES_KEY, CAPTURE_KEY, REPORT_KEY)
_CACHE_SIZE = 256
_MAX_CACHED_BYTES = 1 << 14
"""Size limit of cached ``extra_args`` values. Larger ones contain vectors, which rarely repeat."""


class RequestComposer:
    """Composer of request programs. Caches the results for small requests, which are often equal.

    Args:
        features: The autoencoders of the engine.
        num_layers: The number of layers of its model.
    """

    def __init__(self, features: FeatureReader, num_layers: int) -> None:
        self._features, self._num_layers = features, num_layers
        self._cache: tuple[Snapshot | None, dict[tuple[bytes | None, ...], dict[str, bytes]]] = (None, {})

    def compose(self, extra: Mapping[str, Any], snapshot: Snapshot) -> Mapping[str, Any]:
        """Return ``extra_args`` for the engine: with the complete program and a description of what was applied.

        Returns ``extra`` itself if nothing applies, or if it is already composed.

        Raises:
            SteeringError: A module is unknown, the parts are incompatible, or a reserved key has an invalid value.
        """
        if APPLIED_KEY in extra:
            if not isinstance(extra[APPLIED_KEY], bytes):
                raise SteeringError(f"extra_args.{APPLIED_KEY}", "is reserved for internal use")
            return extra
        steering_args = {name: extra[name] for name in _COMPOSED_KEYS if name in extra}
        if PROGRAM_KEY not in steering_args and MODULES_KEY not in steering_args and snapshot.steering_digest is None:
            return extra
        rest = {name: value for name, value in extra.items() if name not in steering_args}
        if not all(isinstance(value, bytes) and len(value) <= _MAX_CACHED_BYTES for value in steering_args.values()):
            return {**rest, **self._compose(steering_args, snapshot)}
        # One tuple, so that a concurrent thread cannot combine this snapshot with the entries of another.
        cached_snapshot, cache = self._cache
        if cached_snapshot is not snapshot or len(cache) >= _CACHE_SIZE:
            cache = {}
            self._cache = snapshot, cache
        key = tuple(steering_args.get(name) for name in _COMPOSED_KEYS)
        if key not in cache:
            cache[key] = self._compose(steering_args, snapshot)
        return {**rest, **cache[key]}

    def _compose(self, steering_args: Mapping[str, Any], snapshot: Snapshot) -> dict[str, bytes]:
        return _compose(steering_args, snapshot, _Names(snapshot, self._features, self._num_layers))


def count_edits(extra: Mapping[str, Any], snapshot: Snapshot) -> int:
    """Return the number of edits in the modules that ``extra_args`` names, without joining their programs.

    Raises:
        UnknownModuleError: A module is unknown.
    """
    modules = _resolve(read_references(extra) or (), snapshot)
    return sum(len(snapshot.content(module.digest).program.edits) for module in modules)


def resolve_probes(
    specs: tuple[tuple[str, CaptureSpec], ...], snapshot: Snapshot
) -> tuple[tuple[str, CaptureSpec], ...]:
    """Return ``specs`` with the names of probes replaced by their directions.

    Raises:
        UnknownModuleError: A module is unknown.
        SteeringError: A module has no probe of that name.
    """
    return tuple(
        (consumer, spec.with_changes(reduce=_projection(spec, spec.reduce, snapshot, f"capture.{consumer}")))
        if isinstance(spec.reduce, NamedProjection)
        else (consumer, spec)
        for consumer, spec in specs
    )


def find_vector(name: object, snapshot: Snapshot, field: str, *, dosed: bool) -> Vector | Direction | Directions:
    """Return what the vector ``name`` of an edit refers to.

    Args:
        name: ``module`` for its vectors, or ``module/probe`` for the direction of a probe.
        snapshot: The registry.
        field: Path of the name, for errors.
        dosed: Whether the edit has a dose, so that a probe needs the site for which it was made.

    Raises:
        UnknownModuleError: The module is unknown.
        SteeringError: The name has another form, the module has other edits or no such probe, or a dose has no meaning.
    """
    if not isinstance(name, str):  # a scale or a dose in the reference would be lost
        raise SteeringError(field, f'must be a name, such as "calm" or "calm/joy", not {shown(name)}')
    if "/" not in name:
        module = parse_reference(name, field)
        if dosed:
            refuse_dosed_digest(module, field)
        return snapshot.directions(snapshot.find(module, field)[1], name, field)
    reference = parse_probe(name, field)
    probe = find_probe(reference, snapshot, field)
    weights = probe.direction(name, field)
    if not dosed:
        return weights
    length = float(np.linalg.norm(weights.astype(np.float64)))
    if probe.point is None or probe.layer is None or not length:
        problem = f"the probe {name} has no point, layer or length, so a dose has no meaning; give a strength"
        raise SteeringError(field, problem)
    refuse_dosed_digest(reference.module, field)
    stream = snapshot.find(reference.module, field)[1].metadata.streams.get(probe.layer, float("nan"))
    return Direction(probe.point, probe.layer, (weights / length).astype(np.float32), stream, length)


@dataclass(frozen=True)
class _Names:
    """Probes of the modules in a snapshot, and autoencoders, by the names in programs; see `bind_names`."""

    snapshot: Snapshot
    features: FeatureReader
    num_layers: int

    @property
    def any_site(self) -> bool:
        return self.features.any_site

    def probe(self, name: str, field: str) -> Probe:
        return find_probe(parse_probe(name, field), self.snapshot, field)

    def site(self, sae: str, field: str) -> SaeSite:
        return self.features.site(sae, field)

    def feature(self, sae: str, index: int, field: str) -> FeatureVectors:
        return self.features.feature(sae, index, field)


def _compose(steering_args: Mapping[str, Any], snapshot: Snapshot, names: _Names) -> dict[str, bytes]:
    own = None if PROGRAM_KEY not in steering_args else Program.from_bytes(steering_args[PROGRAM_KEY])
    references = read_references(steering_args)
    modules = _resolve(references or (), snapshot)
    joined = own
    composed = {key: value for key, value in steering_args.items() if key not in (MODULES_KEY, REPORT_KEY)}
    if own is not None and own.has_names:
        own = joined = bind_names(own, names)
        composed[PROGRAM_KEY] = own.encode_cached()
    if own is not None and references is not None and CAPTURE_KEY in steering_args:
        specs = resolve_probes(read_specs(steering_args), snapshot)
        composed[CAPTURE_KEY] = encode_specs(specs)
        # Recompile the captures: now that the directions are known, the engine may be able to compute the projections.
        paths = [f"capture.{consumer}" for consumer, _ in specs]
        own = join([own.without_captures(), compile_program([], [spec for _, spec in specs], capture_paths=paths)])
        composed[PROGRAM_KEY] = own.encode_cached()
    named = [snapshot.program(each, f"{MODULES_FIELD}[{i}]") for i, each in enumerate(modules)]
    if modules or snapshot.steering_digest is not None:
        steering = snapshot.steering_program
        global_programs = [] if steering is None else [with_source(steering, GLOBAL_SOURCE)]
        joined = join([*global_programs, *named, *([] if own is None else [own])])
        composed[PROGRAM_KEY] = joined.encode_cached()
    idle, doses = _read_report(steering_args)
    if modules or snapshot.steering_digest is not None or idle or (own is not None and (own.edits or own.readouts)):
        idle += [f"{MODULES_FIELD}[{i}]" for i, program in enumerate(named) if not program.edits]
        no_effect = [{"edit": path, "reason": "zero_strength"} for path in idle]
        no_effect += [{"edit": path, "reason": "zero_vector"} for path in (() if joined is None else joined.zero_edits)]
        composed[APPLIED_KEY] = _encode_applied(snapshot, modules, own, no_effect, doses)
    return composed


def _read_report(ours: Mapping[str, Any]) -> tuple[list[str], dict[str, float]]:
    """Return the paths of the request's edits with strength 0, and the doses of its edits by path."""
    try:
        return msgspec.msgpack.decode(ours.get(REPORT_KEY, b"\x92\x90\x80"), type=tuple[list[str], dict[str, float]])
    except (msgspec.MsgspecError, TypeError):
        raise SteeringError(f"extra_args.{REPORT_KEY}", "is reserved for internal use") from None


def _resolve(references: tuple[Reference, ...], snapshot: Snapshot) -> tuple[ResolvedModule, ...]:
    return tuple(snapshot.find_edits(each, f"{MODULES_FIELD}[{i}]") for i, each in enumerate(references))


def _projection(spec: CaptureSpec, named: NamedProjection, snapshot: Snapshot, source: str) -> Projection:
    """Return the directions of the probes that a capture names; raise SteeringError if it reads them elsewhere."""
    directions = []
    for i, name in enumerate(named.probes):
        field = f"{source}.reduce.probes[{i}]"
        probe = find_probe(name, snapshot, field)
        for point, layers in spec.hooks:
            for layer in () if layers == "all" else layers:
                probe.check(name, {"point": point, "layer": layer}, field)
            if layers == "all" and probe.layer is not None:
                raise SteeringError(field, f"{name} was registered with layer {probe.layer}; capture that layer only")
        directions.append(probe.projected(name, field))
    return Projection(directions, f"{source}.reduce.probes")


def find_probe(probe: ProbeReference, snapshot: Snapshot, field: str) -> Probe:
    """Return a probe; raise SteeringError if the module or the probe is unknown."""
    module, _ = snapshot.find(probe.module, field)
    probes = snapshot.content(module.digest).probes
    if probe.probe not in probes:
        existing = ", ".join(probes) or "none"
        raise SteeringError(field, f"module {probe.module} has no probe {probe.probe!r}; its probes are: {existing}")
    return probes[probe.probe]


def _encode_applied(
    snapshot: Snapshot,
    modules: tuple[ResolvedModule, ...],
    own: Program | None,
    no_effect: list[dict[str, str]],
    doses: dict[str, float],
) -> bytes:
    """Return the JSON of a `SteeringApplied`, which is encoded for every request but rarely decoded."""
    # The steps refer to vectors by digest.
    steps = b"" if own is None or not own.edits else msgspec.msgpack.encode(own.edits)
    return msgspec.json.encode(
        {
            "epoch": snapshot.epoch,
            "global": snapshot.steering_digest,
            "modules": modules,
            "request": DIGEST_PREFIX + hashlib.sha256(steps).hexdigest() if steps else None,
            **({"no_effect": no_effect} if no_effect else {}),
            **({"doses": doses} if doses else {}),
        }
    )

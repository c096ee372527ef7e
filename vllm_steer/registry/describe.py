# SPDX-License-Identifier: Apache-2.0
"""Conversion of registry snapshots to the API objects of `schema`."""

from __future__ import annotations

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.registry.directions import Directions
from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.module import TIERS, Module
from vllm_steer.registry.schema import (
    Content,
    GlobalSteering,
    ModuleInfo,
    ModuleList,
    ModuleUse,
    ProbeInfo,
    StreamLength,
)
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.request.references import Reference


def describe_modules(snapshot: Snapshot) -> ModuleList:
    """Return the description of all modules, ordered by name."""
    names = sorted(snapshot.index.modules)
    return ModuleList(epoch=snapshot.epoch, data=[describe_module(snapshot, Reference(name, None)) for name in names])


def describe_module(snapshot: Snapshot, reference: Reference, *, data: bool = False) -> ModuleInfo:
    """Return the description of one module, with its vectors if ``data``; raises ``UnknownModuleError``."""
    resolved, version = snapshot.find(reference, "name")
    problem = None
    try:
        module = snapshot.content(resolved.digest)
    except RegistryUnavailableError as error:
        module, problem = Module(), error.problem
    # For a reference by digest alone: any name that has this version.
    name = reference.name or next(name for name, versions in snapshot.index.modules.items() if version in versions)
    return ModuleInfo(
        epoch=snapshot.epoch,
        name=name,
        digest=version.digest,
        versions=[each.digest for each in snapshot.index.modules[name]],
        description=version.metadata.description,
        model=version.metadata.model,
        provenance=version.metadata.provenance,
        registered=version.registered,
        width=module.width,
        probes=list(module.probes),
        content=_content(module, data),
        streams=stream_lengths(module, version.metadata),
        problem=problem,
    )


def describe_steering(snapshot: Snapshot, *, data: bool = False) -> GlobalSteering:
    """Return the description of global steering, with its vectors if ``data``.

    Raises:
        RegistryUnavailableError: The content could not be read.
    """
    steering = snapshot.index.steering
    return GlobalSteering(
        epoch=snapshot.epoch,
        digest=steering.digest,
        modules=[ModuleUse(**msgspec.structs.asdict(each)) for each in steering.modules],
        content=_content(Module() if steering.content is None else snapshot.content(steering.content), data),
    )


def stream_lengths(module: Module, metadata: ModuleMetadata) -> list[StreamLength]:
    """Return the lengths of the stream that a module tells, by site; none if they are not of its vectors."""
    if not metadata.streams:
        return []
    try:
        return [
            StreamLength(point=each.point, layer=each.layer, length=each.stream, strength=each.strength(1.0))
            for each in Directions.of(module, metadata, "").values()
            if each.stream > 0
        ]
    except SteeringError:
        return []


def _content(module: Module, data: bool) -> Content:
    tiers: dict[str, dict[str, list[int]]] = {}
    for tier in TIERS:
        for edit in getattr(module, tier):
            tiers.setdefault(tier, {}).setdefault(edit.point, []).append(int(edit.layers[0]))
    return Content(
        tiers=tiers,
        edits=[f"{edit.kind} at {edit.point}" for edit in module.edits],
        probes={name: ProbeInfo.of(probe) for name, probe in module.probes.items()},
        num_bytes=module.num_bytes,
        data=module.to_wire() if data else None,
    )

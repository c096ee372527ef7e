# SPDX-License-Identifier: Apache-2.0
"""A state of the registry in words and numbers, as `schema.py` has them."""

from __future__ import annotations

from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.registry.module import TIERS, Module
from vllm_steer.registry.schema import Content, GlobalSteering, ModuleInfo, ModuleList, ModuleUse
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.spec.references import Reference


def describe_list(snapshot: Snapshot) -> ModuleList:
    """All names."""
    names = sorted(snapshot.index.modules)
    return ModuleList(epoch=snapshot.epoch, data=[describe_module(snapshot, Reference(name, None)) for name in names])


def describe_module(snapshot: Snapshot, reference: Reference, *, data: bool = False) -> ModuleInfo:
    """One module; raises UnknownModuleError."""
    use, version = snapshot.find(reference, "name")
    problem = None
    try:
        module = snapshot.content(use.digest)
    except RegistryUnavailableError as error:
        module, problem = Module(), error.problem
    name = reference.name or next(
        name for name, versions in snapshot.index.modules.items() if version in versions
    )  # referred to by digest alone: any name that has it
    return ModuleInfo(
        epoch=snapshot.epoch,
        name=name,
        digest=version.digest,
        versions=[each.digest for each in snapshot.index.modules[name]],
        description=version.about.description,
        model=version.about.model,
        provenance=version.about.provenance,
        registered=version.registered,
        width=module.width,
        probes=list(module.probes),
        content=_content(module, data),
        problem=problem,
    )


def describe_steering(snapshot: Snapshot, *, data: bool = False) -> GlobalSteering:
    """Global steering; raises RegistryUnavailableError where its content could not be read."""
    steering = snapshot.index.steering
    return GlobalSteering(
        epoch=snapshot.epoch,
        digest=steering.digest,
        modules=[ModuleUse(name=use.name, digest=use.digest, scale=use.scale) for use in steering.modules],
        content=_content(Module() if steering.content is None else snapshot.content(steering.content), data),
    )


def _content(module: Module, data: bool) -> Content:
    tiers: dict[str, dict[str, list[int]]] = {}
    for tier in TIERS:
        for edit in getattr(module, tier):
            tiers.setdefault(tier, {}).setdefault(edit.point, []).append(int(edit.layers[0]))
    return Content(
        tiers=tiers,
        edits=[f"{edit.kind} at {edit.point}" for edit in module.edits],
        num_bytes=module.num_bytes,
        data=module.to_wire() if data else None,
    )

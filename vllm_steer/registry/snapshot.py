# SPDX-License-Identifier: Apache-2.0
"""Immutable snapshots of the registry. Every change creates the next snapshot, with the next epoch number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import REGISTRY_MIB
from vllm_steer.program import Program, join, scaled, with_source
from vllm_steer.registry.directions import Directions, only_probes, streams_at
from vllm_steer.registry.errors import RegistryFullError, RegistryUnavailableError, UnknownModuleError
from vllm_steer.registry.index import (
    GlobalSteeringState,
    ModuleVersion,
    RegistryIndex,
    RegistryLimits,
    ResolvedModule,
)
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.module import Module
from vllm_steer.request import Edit
from vllm_steer.request.references import Reference
from vllm_steer.request.scalars import read_number


@dataclass(frozen=True)
class Snapshot:
    """Index and content of a registry at one epoch."""

    index: RegistryIndex = field(default_factory=RegistryIndex)
    contents: Mapping[str, Module] = field(default_factory=dict)
    """Modules by digest."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Reasons why content could not be read, by digest."""

    @property
    def epoch(self) -> int:
        """Number of changes that led to this state."""
        return self.index.epoch

    def content(self, digest: str) -> Module:
        """Return the module with that digest; raises ``RegistryUnavailableError`` if it could not be read."""
        if digest in self.contents:
            return self.contents[digest]
        raise RegistryUnavailableError(digest, self.problems.get(digest, "its content is missing"))

    def find(self, reference: Reference, field: str) -> tuple[ResolvedModule, ModuleVersion]:
        """Resolve a reference in this snapshot.

        Raises:
            UnknownModuleError: For ``field``, if the reference matches nothing. The message does not list the existing
                modules, because the client may lack the right to list them.
        """
        if reference.name is None:
            found = self._by_digest.get(reference.digest or "")
        else:
            versions = self.index.modules.get(reference.name, ())
            if not versions:
                raise UnknownModuleError(field, f"unknown module {reference.name!r}")
            found = next((each for each in reversed(versions) if reference.digest in (None, each.digest)), None)
        if found is None:
            if reference.name is None:
                raise UnknownModuleError(field, f"no module has digest {reference.digest}")
            raise UnknownModuleError(
                field,
                f"module {reference.name!r} has no version with digest {reference.digest}; only the last versions of a "
                "name are kept: omit the digest to use the newest, or register the content again",
            )
        resolved = ResolvedModule(reference.name, found.digest, reference.scale)
        return (resolved if reference.dose is None else self._dosed(resolved, reference, found, field)), found

    def find_edits(self, reference: Reference, field: str) -> ResolvedModule:
        """Resolve a reference to a module that steers; raises ``SteeringError`` if it has probes only."""
        resolved, _ = self.find(reference, field)
        if not (module := self.content(resolved.digest)).all_edits:
            raise SteeringError(field, only_probes(module, reference))
        return resolved

    def _dosed(
        self, module: ResolvedModule, reference: Reference, version: ModuleVersion, field: str
    ) -> ResolvedModule:
        """Return a module with the scales that a dose means, which no later change of its metadata affects."""
        refuse_dosed_digest(reference, field)
        directions, dose = self.directions(version, reference, field), float(reference.dose or 0)
        try:
            scales = tuple(each.strength(dose) for each in directions.values())
            for edit, scale in zip(self.content(version.digest).base, scales, strict=True):
                read_number(edit.strength * scale, "strength")
        except SteeringError as error:
            raise SteeringError(f"{field}.{error.field}", error.problem) from None
        return msgspec.structs.replace(module, dose=dose, scales=scales)

    def directions(self, version: ModuleVersion, name: object, field: str) -> Directions:
        """Return the vectors of a module; raises ``SteeringError`` if it has other edits."""
        module = self.content(version.digest)
        try:
            return Directions.of(module, version.metadata, str(name))
        except SteeringError as error:
            raise SteeringError(field, error.problem) from None

    def streams_at(self, point: str, layers: Collection[int]) -> list[float]:
        """Return the lengths that the current modules tell; see `streams_at` of `directions`."""
        current = [versions[-1] for versions in self.index.modules.values()]
        known = [(self.contents[each.digest], each.metadata) for each in current if each.digest in self.contents]
        return [length for each in known for length in streams_at(*each, point, layers)]

    @cached_property
    def _by_digest(self) -> dict[str, ModuleVersion]:
        # A request may contain a thousand digests, and a registry tens of thousands of versions.
        return {version.digest: version for versions in self.index.modules.values() for version in versions}

    def program(self, module: ResolvedModule, source: str) -> Program:
        """Return the program of a module at its scale, with the path of the reference as its source.

        Raises:
            SteeringError: Float32 does not have a strength.
        """
        try:
            return with_source(_scaled_program(self.content(module.digest), module.scales or module.scale), source)
        except RegistryUnavailableError:
            raise
        except SteeringError as error:
            raise SteeringError(source, f"{error.field} {error.problem}") from None

    @cached_property
    def steering_digest(self) -> str | None:
        """Digest of global steering; None if nothing is set."""
        return self.index.steering.digest

    @cached_property
    def steering_program(self) -> Program | None:
        """Compiled global steering; None if nothing is set."""
        steering = self.index.steering
        if self.steering_digest is None:
            return None
        unnamed = [] if steering.content is None else [self.content(steering.content).program]
        modules = [self.program(use, f"modules[{i}]") for i, use in enumerate(steering.modules)]
        return join([*modules, *unnamed])

    def with_module(
        self, name: str, module: Module, metadata: ModuleMetadata, registered: float, limits: RegistryLimits
    ) -> Snapshot:
        """Return the snapshot in which ``module`` is the newest version of ``name``, or ``self`` if it already is.

        Raises:
            RegistryFullError: A limit would be exceeded.
        """
        old = self.index.modules.get(name, ())
        if old and (old[-1].digest, old[-1].metadata) == (module.digest, metadata) and module.digest in self.contents:
            return self
        if not old and len(self.index.modules) >= limits.modules:
            raise RegistryFullError("name", f"the registry is limited to {limits.modules} modules; delete one first")
        versions = [version for version in old if version.digest != module.digest]
        versions.append(ModuleVersion(module.digest, metadata, registered))
        changed = self._next({**self.index.modules, name: tuple(versions[-limits.versions :])}, add=[module])
        return changed._check_size(self, limits)

    def without(self, name: str, digest: str | None) -> Snapshot:
        """Return the snapshot without ``name``, or without that version of it."""
        left = [version for version in self.index.modules[name] if digest is not None and version.digest != digest]
        modules = {key: versions for key, versions in self.index.modules.items() if key != name or left}
        if left:
            modules[name] = tuple(left)
        return self._next(modules)

    def with_steering(self, modules: tuple[ResolvedModule, ...], content: Module, limits: RegistryLimits) -> Snapshot:
        """Return the snapshot with that global steering, or ``self`` if it is the same.

        Raises:
            RegistryFullError: A limit would be exceeded.
        """
        steering = GlobalSteeringState(modules, content.digest if content.width else None)
        if steering == self.index.steering:
            return self
        return self._next(self.index.modules, steering, [content])._check_size(self, limits)

    def _next(
        self,
        modules: dict[str, tuple[ModuleVersion, ...]],
        steering: GlobalSteeringState | None = None,
        add: Iterable[Module] = (),
    ) -> Snapshot:
        steering = self.index.steering if steering is None else steering
        index = RegistryIndex(epoch=self.epoch + 1, modules=modules, steering=steering)
        contents = {**self.contents, **{module.digest: module for module in add}}
        needed = index.digests()
        return Snapshot(
            index,
            {digest: module for digest, module in contents.items() if digest in needed},
            {digest: problem for digest, problem in self.problems.items() if digest in needed - contents.keys()},
        )

    @property
    def num_bytes(self) -> int:
        """Size of all vectors in bytes."""
        return sum(module.num_bytes for module in self.contents.values())

    def _check_size(self, old: Snapshot, limits: RegistryLimits) -> Snapshot:
        size = self.num_bytes
        # A change that adds no vectors is always accepted: a server may start with a limit below the present size.
        if size > max(limits.num_bytes, old.num_bytes):
            raise RegistryFullError(
                "module",
                f"would increase the registry to {size} bytes of vectors; at most {limits.num_bytes} fit. "
                f"Delete modules, or raise {REGISTRY_MIB.flag}",
            )
        return self


def refuse_dosed_digest(reference: Reference, field: str) -> None:
    """Raise ``SteeringError`` for a dose of a digest: several names with other lengths of the stream can have it."""
    if reference.name is None:
        problem = "has a dose, so it needs the name of the module: a digest does not tell the length of the stream"
        raise SteeringError(field, problem)


@lru_cache(maxsize=64)
def _scaled_program(module: Module, scale: float | tuple[float, ...]) -> Program:
    if isinstance(scale, float):
        return scaled(module.program, scale)
    factors = zip(module.base, scale, strict=True)
    edits = [
        Edit("add", point=edit.point, layers=edit.layers, vector=edit.vector, strength=edit.strength * factor)
        for edit, factor in factors
    ]
    return Module(base=tuple(edits)).program

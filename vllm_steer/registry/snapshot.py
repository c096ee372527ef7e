# SPDX-License-Identifier: Apache-2.0
"""One state of the registry: immutable, numbered by its epoch. A change makes the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import msgspec

from vllm_steer.program import Program, join, scaled, with_source
from vllm_steer.registry.about import About
from vllm_steer.registry.errors import RegistryFullError, RegistryUnavailableError, UnknownModuleError
from vllm_steer.registry.module import DIGEST_PREFIX, Module
from vllm_steer.spec.references import Reference

INDEX_VERSION = 1


@lru_cache(maxsize=64)
def _at_scale(module: Module, scale: float) -> Program:
    return scaled(module.program, scale)


@dataclass(frozen=True)
class RegistryLimits:
    """How much a registry holds."""

    modules: int = 4096
    """Most names."""
    versions: int = 8
    """Most versions of one name; the oldest makes room for the next."""
    num_bytes: int = 1 << 30
    """Most bytes of vectors, all versions together: every server process has them in memory."""
    norm: float = 0.0
    """Most that an edit may add; 0 for no ceiling."""


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of a name."""

    digest: str
    about: About
    registered: float


class Use(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module that is referred to, found: the content under ``digest`` is meant, whatever the name means later."""

    name: str | None
    digest: str
    scale: float


class GlobalSteeringState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Global steering: modules, then content of its own."""

    modules: tuple[Use, ...] = ()
    content: str | None = None
    """Digest of a module without a name."""

    @property
    def digest(self) -> str | None:
        """Of the whole; None where there is nothing."""
        if not self.modules and self.content is None:
            return None
        parts = [[use.digest, use.scale] for use in self.modules]
        return DIGEST_PREFIX + hashlib.sha256(msgspec.json.encode([parts, self.content])).hexdigest()


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a state but the content of modules."""

    version: int = INDEX_VERSION
    epoch: int = 0
    modules: dict[str, tuple[Version, ...]] = {}
    """By name, each with its versions, the newest last."""
    steering: GlobalSteeringState = GlobalSteeringState()

    def digests(self) -> set[str]:
        """Of all content that this state needs."""
        used = {use.digest for use in self.steering.modules}
        named = {version.digest for versions in self.modules.values() for version in versions}
        own = set() if self.steering.content is None else {self.steering.content}
        return used | named | own


@dataclass(frozen=True)
class Snapshot:
    """A state with its content."""

    index: Index = field(default_factory=Index)
    contents: Mapping[str, Module] = field(default_factory=dict)
    """By digest."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why content is not there, by digest."""

    @property
    def epoch(self) -> int:
        return self.index.epoch

    def content(self, digest: str) -> Module:
        """The module with that digest; raises RegistryUnavailableError where it could not be read."""
        if digest in self.contents:
            return self.contents[digest]
        raise RegistryUnavailableError(digest, self.problems.get(digest, "its content is not there"))

    def find(self, reference: Reference, field: str) -> tuple[Use, Version]:
        """What ``reference`` means in this state; raises UnknownModuleError, naming ``field``, where it is nothing."""
        if reference.name is None:
            found = self._by_digest.get(reference.digest or "")
        else:
            versions = self.index.modules.get(reference.name, ())
            if not versions:
                raise UnknownModuleError(field, f"there is no module {reference.name}")
            found = next((each for each in reversed(versions) if reference.digest in (None, each.digest)), None)
        if found is None:
            # What there is instead is for those to see who may list modules.
            what = "there is no module" if reference.name is None else f"{reference.name} has no version"
            raise UnknownModuleError(field, f"{what} {reference.digest}")
        return Use(reference.name, found.digest, reference.scale), found

    @cached_property
    def _by_digest(self) -> dict[str, Version]:
        """Versions by their digests alone: requests may name a thousand, and a registry may have tens of thousands."""
        return {version.digest: version for versions in self.index.modules.values() for version in versions}

    def program(self, use: Use) -> Program:
        """The program of a module at its scale."""
        return _at_scale(self.content(use.digest), use.scale)

    @cached_property
    def steering_digest(self) -> str | None:
        """Of the global steering; None where there is none."""
        return self.index.steering.digest

    @cached_property
    def steering_program(self) -> Program | None:
        """The global steering, compiled; None where there is none."""
        steering = self.index.steering
        if self.steering_digest is None:
            return None
        own = [] if steering.content is None else [self.content(steering.content).program]
        modules = [with_source(self.program(use), f"modules[{i}]") for i, use in enumerate(steering.modules)]
        return join([*modules, *own])

    def with_module(
        self, name: str, module: Module, about: About, registered: float, limits: RegistryLimits
    ) -> Snapshot:
        """The state in which ``name`` means ``module``; this very one where it does already and the content is there.

        Raises:
            RegistryFullError: there is no room for it.
        """
        old = self.index.modules.get(name, ())
        if old and (old[-1].digest, old[-1].about) == (module.digest, about) and module.digest in self.contents:
            return self
        if not old and len(self.index.modules) >= limits.modules:
            raise RegistryFullError("name", f"there are {limits.modules} modules, the most there can be; delete one")
        versions = [version for version in old if version.digest != module.digest]
        versions.append(Version(module.digest, about, registered))
        changed = self._with({**self.index.modules, name: tuple(versions[-limits.versions :])}, add=[module])
        return changed._within(limits)

    def without(self, name: str, digest: str | None) -> Snapshot:
        """The state in which ``name``, or that version of it, means nothing."""
        left = [version for version in self.index.modules[name] if digest is not None and version.digest != digest]
        modules = {key: versions for key, versions in self.index.modules.items() if key != name or left}
        if left:
            modules[name] = tuple(left)
        return self._with(modules)

    def with_steering(self, modules: tuple[Use, ...], content: Module, limits: RegistryLimits) -> Snapshot:
        """The state with that global steering; this very one where it is the same.

        Raises:
            RegistryFullError: there is no room for it.
        """
        steering = GlobalSteeringState(modules, content.digest if content.width else None)
        if steering == self.index.steering:
            return self
        return self._with(self.index.modules, steering, [content])._within(limits)

    def _with(
        self,
        modules: dict[str, tuple[Version, ...]],
        steering: GlobalSteeringState | None = None,
        add: Iterable[Module] = (),
    ) -> Snapshot:
        steering = self.index.steering if steering is None else steering
        index = Index(epoch=self.epoch + 1, modules=modules, steering=steering)
        contents = {**self.contents, **{module.digest: module for module in add}}
        needed = index.digests()
        return Snapshot(
            index,
            {digest: module for digest, module in contents.items() if digest in needed},
            {digest: problem for digest, problem in self.problems.items() if digest in needed - contents.keys()},
        )

    def _within(self, limits: RegistryLimits) -> Snapshot:
        size = sum(module.num_bytes for module in self.contents.values())
        if size > limits.num_bytes:
            raise RegistryFullError(
                "module", f"would make {size} bytes of vectors of all modules; {limits.num_bytes} is the most"
            )
        return self

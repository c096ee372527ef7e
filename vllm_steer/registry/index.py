# SPDX-License-Identifier: Apache-2.0
"""The registry's index: names, versions and global steering. Content is referred to by digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.module import DIGEST_PREFIX

INDEX_VERSION = 1


@dataclass(frozen=True)
class RegistryLimits:
    """Limits of a registry's size, and of the edits in it."""

    modules: int = 4096
    """Maximum number of names."""
    versions: int = 8
    """Maximum number of versions of one name. Registering another one drops the oldest."""
    num_bytes: int = 1 << 30
    """Maximum total size of the vectors in bytes. Every server process holds them in memory."""
    max_norm: float = 0.0
    """Maximum norm that an edit may add; 0 for no limit."""


class ModuleVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of a named module."""

    digest: str
    metadata: ModuleMetadata = msgspec.field(name="about")
    registered: float
    """In seconds since 1970."""


class ResolvedModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module reference bound to content: later versions of the name do not change it."""

    name: str | None
    """None if the reference contained only a digest."""
    digest: str
    scale: float


class GlobalSteeringState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Global steering: modules, followed by unnamed content."""

    modules: tuple[ResolvedModule, ...] = ()
    content: str | None = None
    """Digest of the unnamed content."""

    @property
    def digest(self) -> str | None:
        """Digest of modules and content; None if both are empty."""
        if not self.modules and self.content is None:
            return None
        parts = [[module.digest, module.scale] for module in self.modules]
        return DIGEST_PREFIX + hashlib.sha256(msgspec.json.encode([parts, self.content])).hexdigest()


class RegistryIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a registry without the content of its modules."""

    version: int = INDEX_VERSION
    epoch: int = 0
    modules: dict[str, tuple[ModuleVersion, ...]] = {}
    """Versions by name, the newest last."""
    steering: GlobalSteeringState = GlobalSteeringState()

    def digests(self) -> set[str]:
        """Return the digests of all content that the index refers to."""
        applied = {module.digest for module in self.steering.modules}
        named = {version.digest for versions in self.modules.values() for version in versions}
        unnamed = set() if self.steering.content is None else {self.steering.content}
        return applied | named | unnamed

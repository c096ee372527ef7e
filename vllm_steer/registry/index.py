# SPDX-License-Identifier: Apache-2.0
"""The registry's index: names, versions and global steering. Content is referred to by digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from vllm_steer.registry.errors import FIELD, RegistryFullError, RegistryUnavailableError
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.module import DIGEST_PREFIX

INDEX_VERSION = 1
MAX_INDEX_BYTES = 1 << 28
"""Size limit for reading an index."""
MAX_WRITTEN_INDEX_BYTES = MAX_INDEX_BYTES // 2
"""Size limit for growing an index, well below the limit for reading one."""


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


class ResolvedModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A module reference bound to content: later versions of the name do not change it."""

    name: str | None
    """None if the reference contained only a digest."""
    digest: str
    scale: float
    dose: float | None = None
    """Dose of each vector; None if the reference had a scale."""
    scales: tuple[float, ...] = ()
    """Scale of each vector that the dose means, in the order of the module's edits."""


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
        parts = [[module.digest, module.scales or module.scale] for module in self.modules]
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


def encode_index(index: RegistryIndex, old_size: int) -> bytes:
    """Return an index as JSON, which replaces one of ``old_size`` bytes; raises ``RegistryFullError``."""
    data = msgspec.json.encode(index)
    # An index that does not grow is always accepted: otherwise nothing could be deleted from one that is too large.
    if len(data) > max(MAX_WRITTEN_INDEX_BYTES, old_size):
        raise RegistryFullError(
            "module",
            f"would increase the registry's index to {len(data)} bytes; at most {MAX_WRITTEN_INDEX_BYTES} are "
            "allowed. Delete a module, or shorten description and provenance",
        )
    return data


def decode_index(data: bytes) -> RegistryIndex:
    """Parse an index; raises ``RegistryUnavailableError``."""
    try:
        index = msgspec.json.decode(data, type=RegistryIndex)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RegistryUnavailableError(FIELD, f"its index cannot be parsed: {error}") from None
    if index.version != INDEX_VERSION:
        raise RegistryUnavailableError(FIELD, f"its index has version {index.version}, not {INDEX_VERSION}")
    return index

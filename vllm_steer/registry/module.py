# SPDX-License-Identifier: Apache-2.0
"""Modules: edits and probes, identified by a digest of their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_EDITS
from vllm_steer.points import POINT_NAMES
from vllm_steer.program import Program, compile_program
from vllm_steer.request import Edit, Vector
from vllm_steer.request.edit_fields import collect_edits, read_edits, read_vectors
from vllm_steer.request.probe import Probe
from vllm_steer.request.references import read_name
from vllm_steer.request.scalars import shown, shown_name
from vllm_steer.request.selector import SelectorName
from vllm_steer.request.vector import pack_array

TIERS: Mapping[str, SelectorName] = MappingProxyType({"base": "all", "prefill": "prompt", "decode": "generated"})
"""Tokens to which the vectors of a tier are added. The tiers apply in this order, before ``edits``."""
EDITS, PROBES = "edits", "probes"
CONTENT_KEYS: tuple[str, ...] = (*TIERS, EDITS, PROBES)

MAX_PROBES = 1024
DIGEST_PREFIX = "sha256:"


@dataclass(frozen=True, eq=False)
class Module:
    """Immutable content of a module. Equal content has the same digest in every process."""

    base: tuple[Edit, ...] = ()
    """Edits that add to every token; each one applies at one layer of one hook point."""
    prefill: tuple[Edit, ...] = ()
    """Edits that add to prompt tokens."""
    decode: tuple[Edit, ...] = ()
    """Edits that add to generated tokens."""
    edits: tuple[Edit, ...] = ()
    """Edits of any kind, each with its own token selector."""
    probes: Mapping[str, Probe] = field(default_factory=lambda: MappingProxyType({}))
    """Probes by name."""

    @property
    def all_edits(self) -> tuple[Edit, ...]:
        """All edits in the order in which they apply."""
        return (*self.base, *self.prefill, *self.decode, *self.edits)

    @property
    def vectors(self) -> Iterator[Vector]:
        """Vectors of all edits, then the probes. The first array of a probe with a hidden layer is ``[n, H]``."""
        yield from (edit.vector for edit in self.all_edits)
        for probe in self.probes.values():
            yield from probe.arrays

    @property
    def width(self) -> int:
        """Size of each vector; 0 if the module is empty."""
        return next((vector.shape[-1] for vector in self.vectors), 0)

    @cached_property
    def num_bytes(self) -> int:
        """Total size of the vectors in bytes, duplicates included."""
        return sum(vector.nbytes for vector in self.vectors)

    @cached_property
    def program(self) -> Program:
        """Program compiled from the edits."""
        tiers = [f"{tier}.{edit.point}[{edit.layers[0]}]" for tier in TIERS for edit in getattr(self, tier)]
        return compile_program(self.all_edits, edit_paths=[*tiers, *(f"{EDITS}[{i}]" for i in range(len(self.edits)))])

    @cached_property
    def digest(self) -> str:
        """``sha256:`` and the hash of the canonical JSON: sorted keys, and vectors replaced by their hashes."""
        canonical = json.dumps(self._to_dict(_hash), sort_keys=True, separators=(",", ":")).encode()
        return DIGEST_PREFIX + hashlib.sha256(canonical).hexdigest()

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form with packed vectors and without empty parts; `parse_module` is the inverse."""
        return self._to_dict(pack_array)

    def _to_dict(self, encode: Callable[[Vector], Any]) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for tier in TIERS:
            for edit in getattr(self, tier):
                entry = {"vector": encode(edit.vector), "scale": edit.strength}
                written.setdefault(tier, {}).setdefault(edit.point, {})[str(edit.layers[0])] = entry
        if self.edits:
            written[EDITS] = [{**edit.to_wire(), "vector": encode(edit.vector)} for edit in self.edits]
        if self.probes:
            written[PROBES] = {name: probe.to_wire(encode) for name, probe in self.probes.items()}
        return written

    def merged(self, change: Module) -> Module:
        """Return this module updated with ``change``.

        In the tiers, each edit of ``change`` replaces the edit of its layer and hook point. ``edits`` and ``probes``
        are replaced completely if ``change`` has any.

        Raises:
            SteeringError: The result has more edits than `parse_module` accepts.
        """
        tiers = {tier: _merge_tier(getattr(self, tier), getattr(change, tier)) for tier in TIERS}
        merged = Module(**tiers, edits=change.edits or self.edits, probes=change.probes or self.probes)
        if (count := len(merged.all_edits)) > MAX_EDITS:
            raise SteeringError(
                EDITS if change.edits else next((tier for tier in TIERS if getattr(change, tier)), EDITS),
                f"would increase global steering to {count} edits; at most {MAX_EDITS} are allowed. Remove others with "
                "replace=True, or use clear",
            )
        return merged

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Module) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        counts = {key: len(getattr(self, key)) for key in CONTENT_KEYS}
        return f"Module({', '.join(f'{key}: {count}' for key, count in counts.items() if count)}, {self.digest[:19]})"


def parse_module(content: Mapping[str, Any]) -> Module:
    """Parse the content of a module.

    Args:
        content: Values by key; None means absent. ``base``, ``prefill`` and ``decode`` are
            ``{point: {layer: vector | {"vector": ..., "scale": ...}}}``. ``edits`` is a list of `Edit` objects or of
            dicts with its arguments. ``probes`` is ``{name: probe}``; a probe is a vector or a dict of
            :class:`~vllm_steer.request.probe.Probe`'s fields.

    Raises:
        SteeringError: A key is unknown, a value is invalid, vectors differ in width, or the module is empty. Its
            ``field`` is the path of the invalid value.
    """
    unknown = [key for key in content if key not in CONTENT_KEYS]
    if unknown:
        raise SteeringError(shown_name(unknown[0]), f"unknown module key; use one of {', '.join(CONTENT_KEYS)}")
    parts: dict[str, list[tuple[str, Edit]]] = {}  # (path in the request, edit)
    for tier, tokens in TIERS.items():
        if content.get(tier) is not None:
            parts[tier] = list(read_vectors(content[tier], tier, tokens))
    if content.get(EDITS) is not None:
        parts[EDITS] = list(read_edits(content[EDITS], EDITS))
    collect_edits(chain.from_iterable(parts.values()))
    for path, edit in parts.get(EDITS, []):
        for name in ("when", "live"):
            if getattr(edit, name):
                raise SteeringError(f"{path}.{name}", "is supported in requests only, not in modules; omit it")
        if edit.tokens.spans or edit.tokens.is_prompt_part:
            problem = "parts of a conversation are supported in requests only, not in modules; name positions"
            raise SteeringError(f"{path}.tokens", problem)
        if edit.feature is not None:
            raise SteeringError(f"{path}.feature", "is supported in requests only, not in modules; omit it")
        if edit.num_rows is not None or edit.subspace is not None:
            name = "vector" if edit.subspace is None else "subspace"
            raise SteeringError(
                f"{path}.{name}", "a matrix or a subspace is supported in requests only, not in modules; use one row"
            )
    probes = {} if content.get(PROBES) is None else _read_probes(content[PROBES])
    edits = {key: tuple(edit for _, edit in pairs) for key, pairs in parts.items()}
    tiers = {tier: _merge_tier((), edits.get(tier, ())) for tier in TIERS}
    module = Module(**tiers, edits=edits.get(EDITS, ()), probes=MappingProxyType(probes))
    for name, probe in probes.items():
        if probe.width != module.width:
            raise SteeringError(f"{PROBES}.{name}", f"has width {probe.width}; other vectors have {module.width}")
    if not module.width:
        raise SteeringError("module", f"is empty; provide at least one of {', '.join(CONTENT_KEYS)}")
    return module


def _read_probes(value: object) -> dict[str, Probe]:
    if not isinstance(value, Mapping) or not value:
        raise SteeringError(PROBES, f"must be a non-empty {{name: probe}}, not {shown(value)}")
    if len(value) > MAX_PROBES:
        raise SteeringError(PROBES, f"has {len(value)} probes; at most {MAX_PROBES} are allowed")
    named = {read_name(name, PROBES): vector for name, vector in value.items()}
    return {name: Probe.parse(named[name], f"{PROBES}.{name}") for name in sorted(named)}


def _merge_tier(old: Iterable[Edit], new: Iterable[Edit]) -> tuple[Edit, ...]:
    """Return one edit per layer and point in execution order; ``new`` replaces ``old``."""
    by_site = {(edit.layers[0], POINT_NAMES.index(edit.point)): edit for edit in chain(old, new)}
    return tuple(edit for _, edit in sorted(by_site.items()))


def _hash(vector: Vector) -> str:
    return hashlib.sha256(np.ascontiguousarray(vector, "<f4").tobytes()).hexdigest()

# SPDX-License-Identifier: Apache-2.0
"""A module: edits for the tokens of a request, and probe directions, under one digest of their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program import Program, compile_program
from vllm_steer.spec import Edit, Vector, pack_vector, parse_vector
from vllm_steer.spec.fields import collect_edits, read_edits, read_vectors
from vllm_steer.spec.references import read_name
from vllm_steer.spec.scalars import shown
from vllm_steer.spec.selector import SelectorName

# Tier -> the tokens that its vectors are added to. Edits apply tier by tier in this order, then those of `edits`.
TIERS: Mapping[str, SelectorName] = MappingProxyType({"base": "all", "prefill": "prompt", "decode": "generated"})
EDITS, PROBES = "edits", "probes"
CONTENT_KEYS: tuple[str, ...] = (*TIERS, EDITS, PROBES)

MAX_PROBES = 1024
DIGEST_PREFIX = "sha256:"


@dataclass(frozen=True, eq=False)
class Module:
    """What a module does; immutable, and the same in every process under the same digest."""

    base: tuple[Edit, ...] = ()
    """Added to every token, each edit at one layer of one point."""
    prefill: tuple[Edit, ...] = ()
    """Added to prompt tokens."""
    decode: tuple[Edit, ...] = ()
    """Added to generated tokens."""
    edits: tuple[Edit, ...] = ()
    """Edits of any kind, each with its own tokens."""
    probes: Mapping[str, Vector] = field(default_factory=lambda: MappingProxyType({}))
    """Directions to read by, float32 ``[H]``."""

    @property
    def all_edits(self) -> tuple[Edit, ...]:
        """In the order in which they apply."""
        return (*self.base, *self.prefill, *self.decode, *self.edits)

    @property
    def vectors(self) -> Iterator[Vector]:
        """Those of the edits, then the probes."""
        yield from (edit.vector for edit in self.all_edits)
        yield from self.probes.values()

    @property
    def width(self) -> int:
        """Components of each vector; 0 for an empty module."""
        return next((vector.size for vector in self.vectors), 0)

    @cached_property
    def num_bytes(self) -> int:
        """What the vectors take, each counted as often as it stands there."""
        return sum(vector.nbytes for vector in self.vectors)

    @cached_property
    def program(self) -> Program:
        """The edits, compiled."""
        tiers = [f"{tier}.{edit.point}[{edit.layers[0]}]" for tier in TIERS for edit in getattr(self, tier)]
        return compile_program(self.all_edits, edit_paths=[*tiers, *(f"{EDITS}[{i}]" for i in range(len(self.edits)))])

    @cached_property
    def digest(self) -> str:
        """``sha256:`` and the hash of the canonical bytes: JSON with sorted keys in which each vector is its hash."""
        canonical = json.dumps(self._written(_hash), sort_keys=True, separators=(",", ":")).encode()
        return DIGEST_PREFIX + hashlib.sha256(canonical).hexdigest()

    def to_wire(self) -> dict[str, Any]:
        """As a JSON body gives it, vectors packed, empty parts left out; `parse_module` is the inverse."""
        return self._written(pack_vector)

    def _written(self, vector: Any) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for tier in TIERS:
            for edit in getattr(self, tier):
                entry = {"vector": vector(edit.vector), "scale": edit.strength}
                written.setdefault(tier, {}).setdefault(edit.point, {})[str(edit.layers[0])] = entry
        if self.edits:
            written[EDITS] = [{**edit.to_wire(), "vector": vector(edit.vector)} for edit in self.edits]
        if self.probes:
            written[PROBES] = {name: vector(probe) for name, probe in self.probes.items()}
        return written

    def merged(self, change: Module) -> Module:
        """This module with ``change`` on top.

        A vector of a tier takes the place of what its site had in that tier; ``edits`` and probes of ``change``, where
        there are any, take the place of all those here.
        """
        tiers = {tier: _merged(getattr(self, tier), getattr(change, tier)) for tier in TIERS}
        return Module(**tiers, edits=change.edits or self.edits, probes=change.probes or self.probes)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Module) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        counts = {key: len(getattr(self, key)) for key in CONTENT_KEYS}
        return f"Module({', '.join(f'{key}: {count}' for key, count in counts.items() if count)}, {self.digest[:19]})"


def parse_module(content: Mapping[str, Any]) -> Module:
    """Read what a module does.

    Args:
        content: values by key, None counting as absent. ``base``, ``prefill`` and ``decode``:
            ``{point: {layer: vector | {"vector": ..., "scale": ...}}}``. ``edits``: a list of `Edit` or of dicts of its
            arguments. ``probes``: ``{name: vector}``.

    Raises:
        SteeringError: a key is unknown, a value is wrong, vectors differ in width, or there is nothing at all; its
            ``field`` is the path of the offending value.
    """
    unknown = [key for key in content if key not in CONTENT_KEYS]
    if unknown:
        raise SteeringError(
            shown(unknown[0]).strip("'") or "''", f"is not a part of a module: {', '.join(CONTENT_KEYS)}"
        )
    parts: dict[str, list[tuple[str, Edit]]] = {}
    for tier, tokens in TIERS.items():
        if content.get(tier) is not None:
            parts[tier] = list(read_vectors(content[tier], tier, tokens))
    if content.get(EDITS) is not None:
        parts[EDITS] = list(read_edits(content[EDITS], EDITS))
    collect_edits(chain.from_iterable(parts.values()))
    probes = {} if content.get(PROBES) is None else _read_probes(content[PROBES])
    edits = {key: tuple(edit for _, edit in pairs) for key, pairs in parts.items()}
    tiers = {tier: _merged((), edits.get(tier, ())) for tier in TIERS}
    module = Module(**tiers, edits=edits.get(EDITS, ()), probes=MappingProxyType(probes))
    for name, probe in probes.items():
        if probe.size != module.width:
            raise SteeringError(f"{PROBES}.{name}", f"has width {probe.size}, other vectors here {module.width}")
    if not module.width:
        raise SteeringError("module", f"is empty; give one of {', '.join(CONTENT_KEYS)}")
    return module


def _read_probes(value: object) -> dict[str, Vector]:
    if not isinstance(value, Mapping) or not value:
        raise SteeringError(PROBES, f"must be {{name: vector}}, not {shown(value)}; leave it out for none")
    if len(value) > MAX_PROBES:
        raise SteeringError(PROBES, f"has {len(value)} probes; a module may have {MAX_PROBES}")
    named = {read_name(name, PROBES): vector for name, vector in value.items()}
    return {name: parse_vector(named[name], f"{PROBES}.{name}") for name in sorted(named)}


def _merged(old: Iterable[Edit], new: Iterable[Edit]) -> tuple[Edit, ...]:
    """One edit for each site, those of ``new`` first in choice, in order of computation."""
    by_site = {(edit.layers[0], POINT_NAMES.index(edit.point)): edit for edit in chain(old, new)}
    return tuple(edit for _, edit in sorted(by_site.items()))


def _hash(vector: Vector) -> str:
    return hashlib.sha256(np.ascontiguousarray(vector, "<f4").tobytes()).hexdigest()

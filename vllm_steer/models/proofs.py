# SPDX-License-Identifier: Apache-2.0
"""Record of the proofs in ``proofs.json``, which ``make conformance`` writes: how each layer class was proven."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

import msgspec

FILE = "proofs.json"


class Proof(msgspec.Struct, frozen=True):
    """Proof of one model of ``tests/conformance``."""

    architecture: str
    layers: tuple[str, ...]
    """Names of its layer classes."""
    vllm: str
    """Version of vLLM that ran the proof."""
    proof: str
    """Kind of evidence."""
    value: float | None = None
    """Largest relative distance of a captured row."""
    cause: float | None = None
    """Largest difference of a log-probability under an edit."""
    dtype: str = "float32"


@cache
def all_proofs() -> tuple[Proof, ...]:
    """Return the recorded proofs."""
    return msgspec.json.decode((files(__package__) / FILE).read_bytes(), type=tuple[Proof, ...])


def proofs_of(architecture: str | None, layer_classes: Iterable[str]) -> list[Proof]:
    """Return the proofs of an architecture or, if it has none, of its layer classes in other architectures."""
    names = {name.rpartition(".")[2] for name in layer_classes}
    same_layers = [row for row in all_proofs() if names & set(row.layers)]
    return [row for row in same_layers if row.architecture == architecture] or same_layers


def own_proofs(architecture: str | None) -> list[Proof]:
    """Return the proofs of an architecture whose layer classes are unknown."""
    return [row for row in all_proofs() if row.architecture == architecture]
